"""The element types that may cross, as torch knows them."""

from __future__ import annotations

from typing import Final

import torch

from tessera.errors import HandOffError
from tessera.wire import Handle

DTYPES: Final = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""By the name a handle gives them; the same ones as in ``geometry``, which frontends use without torch."""


def dtype_name(dtype: torch.dtype) -> str:
    """The wire name of ``dtype``; ``ValueError`` for one that does not cross."""
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise ValueError(f"{dtype} rows cannot be handed off; known are {', '.join(DTYPES)}")


def check_destination(handle: Handle, into: torch.Tensor) -> None:
    """Raise ``HandOffError`` unless ``into`` is exactly what the handle's rows fill."""
    if into.dtype != DTYPES[handle.dtype]:
        raise HandOffError(f"the handle's dtype is {handle.dtype}, the destination's {into.dtype}")
    if tuple(into.shape) != handle.shape:
        raise HandOffError(f"the handle's shape is {handle.shape}, the destination's {tuple(into.shape)}")
    if not into.is_contiguous():
        raise HandOffError("the destination is not contiguous")
