"""Reads the tensors of files that ``torch.save`` wrote; nothing is unpickled.

The format is torch's: an uncompressed ZIP of ``data.pkl`` and a storage for each tensor, ``data/<key>``. Of
pickle's instructions (Python's ``pickletools`` describes them) those that a state of tensors has are carried
out here, on strings, numbers, tuples and dicts alone. What the file names is never looked up.
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
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
_STORAGES: Final = {
    "torch HalfStorage": "<f2",
    "torch FloatStorage": "<f4",
    "torch BFloat16Storage": "<u2",
}
_DICT: Final = "collections OrderedDict"
_TENSOR: Final = "torch._utils _rebuild_tensor_v2"
_NAMES: Final = {_DICT, _TENSOR, *_STORAGES}
_VALUES: Final = {"BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"}
_CONSTANTS: Final = {"NEWTRUE": True, "NEWFALSE": False, "NONE": None}


@dataclass(frozen=True, slots=True)
class _Name:
    """What a file names: the module and the name in it."""

    name: str


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where a tensor lies: ``shape`` numbers of the storage ``key``, from the number ``first`` on."""

    key: str
    kind: str
    stored: int
    first: int
    shape: tuple[int, ...]


class _Stack:
    """Carries out the instructions of a description."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, description: bytes) -> object:
        """Return what a description makes; raises ``ValueError``, ``LookupError`` or ``TypeError``."""
        for opcode, argument, _ in pickletools.genops(description):
            if opcode.name == "STOP":
                return self._values.pop()
            self._step(opcode.name, argument)
        raise ValueError("no end")

    def _step(self, name: str, argument: Any) -> None:
        values = self._values
        match name:
            case _ if name in _VALUES:
                values.append(argument)
            case _ if name in _CONSTANTS:
                values.append(_CONSTANTS[name])
            case "PROTO":
                pass
            case "EMPTY_DICT":
                values.append({})
            case "EMPTY_TUPLE":
                values.append(())
            case "MARK":
                self._marks.append(len(values))
            case "TUPLE":
                values.append(tuple(self._taken(self._marks.pop())))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                values.append(tuple(self._taken(len(values) - int(name[-1]))))
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = values[-1]
            case "BINGET" | "LONG_BINGET":
                values.append(self._memo[argument])
            case "GLOBAL":
                if argument not in _NAMES:
                    raise ValueError(f"it names {argument!r}, which no state of tensors has")
                values.append(_Name(argument))
            case "BINPERSID":
                values.append(_storage(values.pop()))
            case "REDUCE":
                given = values.pop()
                values.append(_made(values.pop(), given))
            case "SETITEM":
                self._set(self._taken(len(values) - 2))
            case "SETITEMS":
                self._set(self._taken(self._marks.pop()))
            case "BUILD":
                # torch's versions of the modules that a state is of.
                values.pop()
            case _:
                raise ValueError(f"the instruction {name}, which no state of tensors has")

    def _taken(self, start: int) -> list[Any]:
        if not 0 <= start <= len(self._values):
            raise ValueError("fewer values than are taken")
        taken = self._values[start:]
        del self._values[start:]
        return taken

    def _set(self, items: Sequence[Any]) -> None:
        target = self._values[-1]
        if not isinstance(target, dict):
            raise TypeError("items of what is no dict")
        target.update(zip(items[::2], items[1::2], strict=True))


def _storage(given: Any) -> tuple[str, str, int]:
    """Return key, kind and length of a storage."""
    word, kind, key, _, count = given
    if word != "storage" or not isinstance(kind, _Name) or kind.name not in _STORAGES:
        raise ValueError("a storage of another form")
    if not (isinstance(key, str) and key.isdecimal() and isinstance(count, int)):
        raise ValueError("a storage of another form")
    return key, kind.name, count


def _made(what: Any, given: Any) -> dict[str, Any] | _Tensor:
    if what == _Name(_DICT) and given == ():
        return {}
    if what != _Name(_TENSOR):
        raise ValueError("a call of what is no tensor")
    (key, kind, stored), first, shape, strides, *_ = given
    count = 1
    for length, step in zip(reversed(shape), reversed(strides), strict=True):
        if step != count or length < 1:
            raise ValueError("a tensor that is not contiguous")
        count *= length
    if not 0 <= first <= stored - count:
        raise ValueError("a tensor beyond its storage")
    return _Tensor(key, kind, stored, first, tuple(shape))


def _arrays(archive: zipfile.ZipFile, folder: str, tensors: Sequence[_Tensor]) -> Iterator[Array]:
    """Yield each tensor's numbers; a storage that several have is read once."""
    if sum(4 * prod(tensor.shape) for tensor in tensors) > _MOST_BYTES:
        raise ValueError("more than 1 GiB")
    storages: dict[str, Array] = {}
    for tensor in tensors:
        if tensor.key not in storages:
            stored = archive.read(f"{folder}/data/{tensor.key}")
            storages[tensor.key] = np.frombuffer(stored, _STORAGES[tensor.kind])
        storage = storages[tensor.key]
        if len(storage) != tensor.stored or storage.dtype != _STORAGES[tensor.kind]:
            raise ValueError("a storage of another length or type")
        numbers = storage[tensor.first : tensor.first + prod(tensor.shape)].reshape(tensor.shape)
        yield from_bfloat16_bits(numbers) if numbers.dtype == np.uint16 else numbers


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
            state = _Stack().run(archive.read(pickled))
            if not isinstance(state, dict) or not state:
                raise ValueError("what it holds is no state")
            state.pop("_metadata", None)
            if not all(isinstance(name, str) and isinstance(one, _Tensor) for name, one in state.items()):
                raise ValueError("not all that it holds are tensors")
            folder = pickled.filename.removesuffix("/data.pkl")
            return dict(zip(state, _arrays(archive, folder, list(state.values())), strict=True))
    except OSError as error:
        raise CheckpointError(f"{path}: not readable: {error}") from error
    # Whatever a file that somebody made by hand leads to.
    except Exception as error:
        raise CheckpointError(f"{path}: no state of tensors that torch.save wrote: {error}") from error
