"""Vision rows that came with the request."""

from __future__ import annotations

import torch

from tessera import wire
from tessera.errors import InvalidInput

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def precomputed_rows(embeddings: wire.Embeddings, *, hidden: int, dtype: str) -> torch.Tensor:
    """``[rows, hidden]`` on the CPU in the worker's own ``dtype``.

    Raises ``InvalidInput`` when the bytes are not what the message says: they come from another process.
    """
    kind = _DTYPES.get(embeddings.dtype)
    if kind is None or embeddings.rows < 1:
        raise InvalidInput(f"{embeddings.dtype[:16]!r} is no dtype of embeddings", param=embeddings.param)
    if len(embeddings.data) != embeddings.rows * hidden * kind.itemsize:
        raise InvalidInput(
            f"{len(embeddings.data)} bytes are not {embeddings.rows} rows of {hidden} {embeddings.dtype}",
            param=embeddings.param,
        )
    # A copy, because torch has no tensors that may not be written to.
    rows = torch.frombuffer(bytearray(embeddings.data), dtype=kind).reshape(embeddings.rows, hidden)
    return rows.to(_DTYPES[dtype])
