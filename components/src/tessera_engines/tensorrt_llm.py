"""Vision rows from TensorRT-LLM's ``MultimodalEncoder``, which batches and runs in processes of its own.

Its rows come as handles to its memory and are copied once into the slots of the slab, and go on from there
under Tessera's own handles and leases.

A handle has the fields with which torch shares tensors between processes, as JSON values with bytes in
base64: a CUDA memory handle, or the name of a shared memory file. An opened tensor counts as a reader; the
producer gets its memory back when the tensor is freed.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch.multiprocessing import reductions

from tessera.dtypes import FLOATS
from tessera.engine.base import vision_of
from tessera.engine.batch import VisionBatch, blank, packed_cost, uint8_pixels
from tessera.engine.placement import Placement
from tessera.engine.settings import EngineSettings
from tessera.errors import ConfigError, EngineFailed, HandOffError
from tessera.launched import Launched
from tessera.models.base import Model, UInt8Array
from tessera_engines.tensorrt.module import load_tensorrt_llm


@runtime_checkable
class KnownToTensorRTLLM(Protocol):
    """A model whose checkpoint ``tensorrt_llm.MultimodalEncoder`` loads."""

    def tensorrt_llm_input(self, pixels: UInt8Array) -> Mapping[str, Any]:
        """One image's uint8 ``[units, *unit_shape]`` as a prompt for the encoder.

        That is ``{"prompt": …, "multi_modal_data": {"image": […]}}``, chosen so that TensorRT-LLM's own
        preprocessing changes nothing more.
        """
        ...


_CUDA, _CPU = 1, 2
_DTYPES = {str(dtype.torch): dtype.torch for dtype in FLOATS.values()}
# Not typed.
_rebuild: Any = reductions


def open_handle(handle: Mapping[str, Any]) -> torch.Tensor:
    """Open a handle as ``[rows, row_width]`` in the memory of its producer; raises ``HandOffError``."""
    try:
        method = handle["method_key"]
        if method == _CUDA:
            rows = _open_cuda(handle)
        elif method == _CPU:
            rows = _open_cpu(handle)
        else:
            raise HandOffError(f"a TensorRT-LLM handle of method {method!r} can only be opened by its maker")
    except KeyError as error:
        raise HandOffError(
            f"a TensorRT-LLM handle lacks {error} or has a type that rows never have"
        ) from error
    except (binascii.Error, TypeError, ValueError, RuntimeError) as error:
        raise HandOffError(f"a TensorRT-LLM handle cannot be opened: {error}") from error
    if rows.ndim < 2:
        raise HandOffError(f"a TensorRT-LLM handle holds {list(rows.shape)}, which are no rows")
    return rows.flatten(0, -2)


def _open_cuda(handle: Mapping[str, Any]) -> torch.Tensor:
    dtype = _DTYPES[handle["dtype"]]
    view = _view(handle, handle["tensor_offset"], handle["storage_size_bytes"] // dtype.itemsize)
    rows: torch.Tensor = _rebuild.rebuild_cuda_tensor(
        torch.Tensor,
        view.size,
        view.stride,
        view.offset,
        torch.storage.TypedStorage,
        dtype,
        handle["storage_device"],
        base64.b64decode(handle["storage_handle"], validate=True),
        handle["storage_size_bytes"],
        handle["storage_offset_bytes"],
        False,
        base64.b64decode(handle["ref_counter_handle"], validate=True),
        handle["ref_counter_offset"],
        base64.b64decode(handle["event_handle"], validate=True),
        handle["event_sync_required"],
    )
    return rows


def _open_cpu(handle: Mapping[str, Any]) -> torch.Tensor:
    dtype = _DTYPES[handle["storage_dtype"]]
    # A typed storage counts elements.
    view = _view(handle, handle["tensor_storage_offset"], handle["storage_size"])
    nbytes = handle["storage_size"] * dtype.itemsize
    name = base64.b64decode(handle["storage_handle"], validate=True)
    _check_shared(name, nbytes)
    manager = base64.b64decode(handle["manager_handle"], validate=True)
    storage = _rebuild.rebuild_storage_filename(torch.UntypedStorage, manager, name, nbytes)
    return torch.empty(0, dtype=dtype).set_(storage, view.offset, view.size, view.stride)


def _check_shared(name: bytes, nbytes: int) -> None:
    """Check that the file is there and large enough, since torch does not; raises ``ValueError``."""
    file = Path("/dev/shm") / os.fsdecode(name).lstrip("/")
    if file.parent != Path("/dev/shm") or not file.is_file():
        raise ValueError(f"there is no shared memory {name!r}")
    if file.stat().st_size < nbytes:
        raise ValueError(f"{file} has {file.stat().st_size} bytes, the handle says {nbytes}")


@dataclass(frozen=True, slots=True)
class _View:
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def _view(handle: Mapping[str, Any], offset: int, elements: int) -> _View:
    """Check that the tensor lies inside its storage: torch would write beyond the end and crash."""
    size, stride = tuple(handle["tensor_size"]), tuple(handle["tensor_stride"])
    numbers = (offset, elements, *size, *stride)
    if len(size) != len(stride) or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"size {size}, stride {stride} and offset {offset} are no place in a storage")
    last = offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    if 0 in size or last >= elements:
        raise ValueError(
            f"size {size} and stride {stride} at {offset} leave a storage of {elements} elements"
        )
    return _View(offset, size, stride)


class DisaggregatedParams(Protocol):
    """The one field of TensorRT-LLM's class of this name that is used here."""

    multimodal_embedding_handles: list[dict[str, Any]] | None


class RequestOutput(Protocol):
    """What ``generate_async`` returns; a future of itself."""

    disaggregated_params: DisaggregatedParams | None

    @property
    def finished(self) -> bool: ...

    def result(self, timeout: float | None = None) -> RequestOutput: ...


class MultimodalEncoder(Protocol):
    """What is used of TensorRT-LLM's class of this name."""

    def generate_async(self, inputs: Mapping[str, Any]) -> RequestOutput: ...

    def shutdown(self) -> None: ...


def write_rows(requests: Sequence[RequestOutput], out: Sequence[torch.Tensor]) -> None:
    """Wait for one request for each image and copy its rows into the tensor of ``out`` beside it.

    Raises ``EngineFailed`` for rows of another number or width, ``HandOffError`` for what is no handle.
    """
    for request, target in zip(requests, out, strict=True):
        params = request.result().disaggregated_params
        if params is None or not params.multimodal_embedding_handles:
            raise EngineFailed("TensorRT-LLM's encoder answered without embedding handles")
        rows = [open_handle(handle) for handle in params.multimodal_embedding_handles]
        count = sum(len(part) for part in rows)
        if count != len(target) or any(part.shape[1:] != target.shape[1:] for part in rows):
            raise EngineFailed(
                f"TensorRT-LLM's encoder gave rows of {[list(part.shape) for part in rows]},"
                f" expected were {list(target.shape)}"
            )
        start = 0
        for part in rows:
            target[start : start + len(part)].copy_(part)
            start += len(part)
    if out and out[0].is_cuda:
        # The encoder takes its memory back as soon as the handles are let go of.
        torch.cuda.current_stream(out[0].device).synchronize()


class TensorRTLLMVisionEngine:
    """Implements ``VisionEngine``; ``device`` says where the rows are wanted."""

    takes_floats = False
    cost = staticmethod(packed_cost)
    depth = 2

    def __init__(self, model: Model, settings: EngineSettings, placement: Placement) -> None:
        if not isinstance(model, KnownToTensorRTLLM):
            raise ConfigError(
                f"TensorRT-LLM's encoder does not know the family {model.family}, which has no"
                " tensorrt_llm_input; use engine: torch or tensorrt"
            )
        self._known: KnownToTensorRTLLM = model
        self._model = model
        self._spec = vision_of(model)
        self._placement = placement
        make = load_tensorrt_llm().llmapi.MultimodalEncoder
        self._encoder: MultimodalEncoder = make(
            model=str(model.path), dtype=placement.dtype, max_batch_size=settings.max_batch_cost
        )

    def warm(self) -> None:
        batch = blank(self._model, 1)
        rows = torch.empty(
            batch.plans[0].rows,
            self._spec.row_width,
            dtype=self._placement.torch_dtype,
            device=self._placement.device,
        )
        self.launch(batch, [rows]).result()

    def launch(self, batch: VisionBatch, out: Sequence[torch.Tensor]) -> Launched[object]:
        requests = [
            self._encoder.generate_async(self._known.tensorrt_llm_input(image))
            for image in uint8_pixels(batch)
        ]
        # TensorRT-LLM may notice only while somebody waits for it: True is right, False may be late.
        return Launched(
            lambda: write_rows(requests, out),
            done=lambda: all(request.finished for request in requests),
        )

    def close(self) -> None:
        self._encoder.shutdown()
