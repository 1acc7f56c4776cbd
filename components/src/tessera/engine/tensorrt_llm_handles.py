"""Tensors from the handles that TensorRT-LLM's encoder answers with.

A handle is what torch's own sharing of tensors between processes consists of, as JSON values with bytes in
base64: a CUDA memory handle, or the name of a file of shared memory. Opening one counts as a reader; letting
the tensor go lets the producer have its memory back.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import reductions

from tessera.errors import HandOffError

_CUDA, _CPU = 1, 2
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}
# Not typed.
_rebuild: Any = reductions


def open_handle(handle: Mapping[str, Any]) -> torch.Tensor:
    """``[rows, hidden]``, in the memory of the process that made it; raises ``HandOffError``."""
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
    """Raises ``ValueError`` unless the file is there and large enough: torch maps it without looking."""
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
    """Where the tensor lies in its storage; torch itself would write beyond the end of it and crash."""
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
