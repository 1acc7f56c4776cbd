"""Reads where tensors lie in files that ``torch.save`` wrote; nothing is unpickled.

The format is torch's: an uncompressed ZIP of ``data.pkl`` and a storage for each tensor, ``data/<key>``. Of
pickle's instructions (Python's ``pickletools`` describes them) those that a state of tensors has are carried
out here, on strings, numbers, tuples and dicts alone. What the file names is never looked up.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt

from tessera.checkpoint.safetensors import StoredTensor, WeightFile, regular_size
from tessera.dtypes import DTYPES, FLOATS, DType, from_bfloat16_bits
from tessera.errors import CheckpointError

Array = npt.NDArray[Any]

# What a tensor takes in a description is some 250 bytes.
_MOST_DESCRIPTION: Final = 16 << 20
_BEFORE_1_6: Final = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")
_STORAGES: Final = {
    f"torch {name}Storage": DTYPES[dtype]
    for name, dtype in {
        "Float": "float32",
        "Half": "float16",
        "BFloat16": "bfloat16",
        "Double": "float64",
        "Long": "int64",
        "Int": "int32",
        "Short": "int16",
        "Char": "int8",
        "Byte": "uint8",
        "Bool": "bool",
    }.items()
}
_DICT: Final = "collections OrderedDict"
_TENSOR: Final = "torch._utils _rebuild_tensor_v2"
_PARAMETER: Final = "torch._utils _rebuild_parameter"
_NAMES: Final = {_DICT, _TENSOR, _PARAMETER, *_STORAGES}
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
    dtype: DType
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


def _storage(given: Any) -> tuple[str, DType, int]:
    """Return key, type and length of a storage."""
    word, kind, key, _, count = given
    if word != "storage" or not isinstance(kind, _Name) or kind.name not in _STORAGES:
        raise ValueError("a storage of another form")
    if not (isinstance(key, str) and key.isdecimal() and isinstance(count, int)):
        raise ValueError("a storage of another form")
    return key, _STORAGES[kind.name], count


def _made(what: Any, given: Any) -> dict[str, Any] | _Tensor:
    if what == _Name(_DICT) and given == ():
        return {}
    if what == _Name(_PARAMETER) and isinstance(given[0], _Tensor):
        return given[0]
    if what != _Name(_TENSOR):
        raise ValueError("a call of what is no tensor")
    (key, dtype, stored), first, shape, strides, *_ = given
    count = 1
    for length, step in zip(reversed(shape), reversed(strides), strict=True):
        if length < 1 or (step != count and length > 1):
            raise ValueError("a tensor that is not contiguous")
        count *= length
    if not 0 <= first <= stored - count:
        raise ValueError("a tensor beyond its storage")
    return _Tensor(key, dtype, stored, first, tuple(shape))


def _described(archive: zipfile.ZipFile) -> tuple[str, bytes, Mapping[str, _Tensor]]:
    """Return the folder of an archive, its description, and the tensors of the state by name."""
    entries = archive.infolist()
    (pickled,) = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
    if any(entry.compress_type for entry in entries) or pickled.file_size > _MOST_DESCRIPTION:
        raise ValueError("a compressed or a long entry")
    folder = pickled.filename.removesuffix("/data.pkl")
    if f"{folder}/byteorder" in archive.namelist() and archive.read(f"{folder}/byteorder") != b"little":
        raise ValueError("numbers of another byte order")
    description = archive.read(pickled)
    state = _Stack().run(description)
    if not isinstance(state, dict) or not state:
        raise ValueError("what it holds is no state")
    state.pop("_metadata", None)
    if not all(isinstance(name, str) and isinstance(one, _Tensor) for name, one in state.items()):
        raise ValueError("not all that it holds are tensors")
    return folder, description, state


def _start(file: IO[bytes], entry: zipfile.ZipInfo, size: int) -> int:
    """Return where an entry's bytes begin, behind a header which is padded in the file alone."""
    file.seek(entry.header_offset)
    head = file.read(30)
    if len(head) < 30 or head[:4] != b"PK\x03\x04" or entry.flag_bits & 1:
        raise ValueError("an entry of another form")
    start: int = entry.header_offset + 30 + sum(struct.unpack("<HH", head[26:]))
    if start + entry.file_size > size:
        raise ValueError("an entry beyond the file")
    return start


def weight_file(path: Path) -> WeightFile:
    """Read the header of a file of either format, which its ending tells; raises ``CheckpointError``."""
    return WeightFile.read(path) if path.suffix == ".safetensors" else state_file(path)


def state_file(path: Path) -> WeightFile:
    """Read where the tensors of a state lie; raises ``CheckpointError``.

    The header is the description, so it has names, shapes and types.
    """
    size = regular_size(path)
    try:
        with path.open("rb") as file:
            if file.read(len(_BEFORE_1_6)) == _BEFORE_1_6:
                raise ValueError("torch before 1.6 wrote it; load it with torch and save it again")
            with zipfile.ZipFile(file) as archive:
                folder, description, state = _described(archive)
                tensors = []
                for name, tensor in state.items():
                    entry = archive.getinfo(f"{folder}/data/{tensor.key}")
                    if entry.file_size != tensor.stored * tensor.dtype.itemsize:
                        raise ValueError("a storage of another length or type")
                    tensors.append(_stored(path, name, tensor, _start(file, entry, size)))
    except OSError as error:
        raise CheckpointError(f"{path}: not readable: {error}") from error
    # Whatever a file that somebody made by hand leads to.
    except Exception as error:
        raise CheckpointError(f"{path}: no state of tensors that torch.save wrote: {error}") from error
    return WeightFile(path=path, header=description, tensors=tuple(tensors))


def _stored(path: Path, name: str, tensor: _Tensor, start: int) -> StoredTensor:
    size = tensor.dtype.itemsize
    return StoredTensor(
        name=name,
        file=path,
        dtype=tensor.dtype,
        shape=tensor.shape,
        start=start + tensor.first * size,
        nbytes=prod(tensor.shape) * size,
    )


def read_state(path: Path) -> dict[str, Array]:
    """Return the tensors of a state of floats by name, bfloat16 ones as float32, mapped from the file.

    Raises ``CheckpointError``.
    """
    found = {}
    for tensor in state_file(path).tensors:
        if tensor.dtype.name not in FLOATS:
            raise CheckpointError(f"{path}: tensor {tensor.name!r} is of {tensor.dtype.name}, not of floats")
        stored = np.memmap(path, tensor.dtype.numpy or "<u2", "r", tensor.start, tensor.shape)
        found[tensor.name] = from_bfloat16_bits(stored) if tensor.dtype.numpy is None else stored
    return found
