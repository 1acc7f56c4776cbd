"""Tensors of files that ``torch.save`` wrote, read by an allow-list: nothing is ever unpickled into code.

The format is torch's: an uncompressed ZIP of ``data.pkl`` and a storage for each tensor, ``data/<key>``.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tessera.dtypes import from_bfloat16_bits
from tessera.errors import CheckpointError

Array = npt.NDArray[Any]

HEAD_FILES: Final = ("sparse_linear.pt", "colbert_linear.pt")
"""The states beside the weights that BGE M3's checkpoints have, of the heads of its further outputs."""

# A state of a few tensors; its description takes less than a KiB.
_MOST_BYTES: Final = 1 << 30
_MOST_DESCRIPTION: Final = 1 << 20
_STORAGES: Final = {"HalfStorage": "<f2", "FloatStorage": "<f4", "BFloat16Storage": "<u2"}


class _State(OrderedDict[str, Array]):
    """Takes what torch sets on a state beside its tensors."""


def _rebuilt(
    storage: tuple[str, Array], offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object
) -> Array:
    kind, values = storage
    count = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if step != count or length < 1:
            raise ValueError("a tensor that is not contiguous")
        count *= length
    if not 0 <= offset <= len(values) - count:
        raise ValueError("a tensor beyond its storage")
    found = values[offset : offset + count].reshape(size)
    return from_bfloat16_bits(found) if kind == "BFloat16Storage" else found


class _Reader(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(BytesIO(archive.read(f"{folder}/data.pkl")))
        self._archive, self._folder = archive, folder

    def find_class(self, module: str, name: str) -> Any:
        allowed: Mapping[tuple[str, str], Callable[..., Any] | str] = {
            ("collections", "OrderedDict"): _State,
            ("torch._utils", "_rebuild_tensor_v2"): _rebuilt,
            **{("torch", storage): storage for storage in _STORAGES},
        }
        try:
            return allowed[module, name]
        except KeyError:
            raise ValueError(f"it names {module}.{name}, which no state of tensors has") from None

    def persistent_load(self, pid: Any) -> tuple[str, Array]:
        word, kind, key, _, count = pid
        if word != "storage" or kind not in _STORAGES or not (isinstance(key, str) and key.isdecimal()):
            raise ValueError("a storage of another form")
        values = np.frombuffer(self._archive.read(f"{self._folder}/data/{key}"), _STORAGES[kind])
        if len(values) != count:
            raise ValueError("a storage of another length")
        return kind, values


def read_state(path: Path) -> dict[str, Array]:
    """Return the tensors of a state by name, bfloat16 ones as float32; raises ``CheckpointError``."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            (pickled,) = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
            if any(entry.compress_type for entry in entries) or pickled.file_size > _MOST_DESCRIPTION:
                raise ValueError("a compressed or a long entry")
            if sum(entry.file_size for entry in entries) > _MOST_BYTES:
                raise ValueError("more than 1 GiB")
            state = _Reader(archive, pickled.filename.removesuffix("/data.pkl")).load()
    except OSError as error:
        raise CheckpointError(f"{path}: not readable: {error}") from error
    # Whatever a pickle that somebody made by hand leads to.
    except Exception as error:
        raise CheckpointError(f"{path}: no state of tensors that torch.save wrote: {error}") from error
    if not isinstance(state, dict) or not all(isinstance(value, np.ndarray) for value in state.values()):
        raise CheckpointError(f"{path}: no state of tensors")
    return dict(state)
