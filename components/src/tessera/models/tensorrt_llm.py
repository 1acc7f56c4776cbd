"""What a family provides when TensorRT-LLM has its vision encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from tessera.models.base import UInt8Array


@runtime_checkable
class KnownToTensorRTLLM(Protocol):
    """A model whose checkpoint ``tensorrt_llm.MultimodalEncoder`` loads."""

    def tensorrt_llm_input(self, tiles: UInt8Array) -> Mapping[str, Any]:
        """One image's uint8 ``[tiles, *tile_shape]`` as a prompt for the encoder.

        That is ``{"prompt": …, "multi_modal_data": {"image": […]}}``, chosen so that TensorRT-LLM's own
        preprocessing changes nothing more.
        """
        ...
