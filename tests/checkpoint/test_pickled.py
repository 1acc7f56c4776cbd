"""States that torch wrote, and files made by hand that want more than to be read.

The reference is ``torch.load``, which unpickles by a list of its own.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.checkpoint.loading import TensorReader
from tessera.checkpoint.pickled import read_state, state_file
from tessera.dtypes import DTYPES
from tessera.errors import CheckpointError


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_states_that_torch_wrote(tmp_path: Path, dtype: torch.dtype) -> None:
    module = torch.nn.Linear(5, 3, dtype=dtype)
    whole = torch.randn(4, 6).to(dtype)
    for state in (
        module.state_dict(),
        dict(module.state_dict()),
        {"a": whole, "b": whole[2:], "a again": whole, "one": torch.ones(1, dtype=dtype)},
    ):
        torch.save(state, tmp_path / "state.pt")
        found = read_state(tmp_path / "state.pt")
        assert list(found) == list(state)
        for name, values in found.items():
            assert torch.equal(torch.from_numpy(np.array(values, np.float32)), state[name].float())


NUMBERS = ["float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"]


def test_tensors_are_those_that_torch_reads(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    whole = torch.randn(8, 6, generator=random)
    state: OrderedDict[str, torch.Tensor] = OrderedDict(
        {name: (10 * whole).to(DTYPES[name].torch) for name in NUMBERS},
        some_rows=whole[3:5],
        tied=whole,
        scalar=torch.tensor(7),
        one_row=whole[:, :1][2:3],
        parameter=torch.nn.Parameter(whole + 1),
    )
    path = tmp_path / "pytorch_model.bin"
    torch.save(state, path)
    expected, found = torch.load(path, weights_only=True), state_file(path).tensors
    assert [tensor.name for tensor in found] == list(expected)
    with TensorReader() as reader:
        for tensor in found:
            value = expected[tensor.name]
            into = torch.empty(value.numel(), dtype=value.dtype)
            reader.read(tensor, into)
            assert tensor.shape == value.shape and torch.equal(into.view(value.shape), value), tensor.name
            if len(tensor.shape) == 2 and tensor.shape[0] == 8:
                row = torch.empty(6, dtype=value.dtype)
                reader.read(tensor.row(5), row)
                assert torch.equal(row, value[5])


def test_numbers_of_heads_are_floats(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3, dtype=torch.int64)}, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match="tensor 'a' is of int64, not of floats"):
        read_state(tmp_path / "state.pt")


def test_a_file_that_changes_or_ends_early_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(64, 64), "b": torch.ones(2)}, path)
    (tensor, _) = state_file(path).tensors
    torch.save({"b": torch.ones(2)}, path)
    with TensorReader() as reader, pytest.raises(CheckpointError, match="cannot read tensor 'a'"):
        reader.read(tensor, torch.empty(4096))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: no state of tensors"):
        state_file(path)


def test_what_torch_wrote_before_it_had_archives_says_so(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"torch before 1\.6 wrote it; load it with torch and save"):
        state_file(path)


@pytest.mark.parametrize(
    "state",
    [
        torch.ones(3),
        {"a": torch.ones(2, 3).T},
        {"a": 3},
        {"a": {"b": torch.ones(3)}},
        {3: torch.ones(3)},
        {"a": torch.ones(0)},
    ],
    ids=["tensor", "turned", "number", "nested", "number for a name", "empty"],
)
def test_what_is_no_state_is_refused(tmp_path: Path, state: object) -> None:
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match=r"state\.pt: no state of tensors"):
        read_state(tmp_path / "state.pt")


def described(path: Path, description: bytes, storages: dict[str, bytes] | None = None) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", description)
        for key, data in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", data)
    return path


class _Calls:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("run",)


_SLOTS = b"}(X\x0b\x00\x00\x00__setitem__X\x01\x00\x00\x00xu"
_REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
_STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"


@pytest.mark.parametrize(
    "description",
    [
        pickle.dumps(_Calls(), 2),
        pickle.dumps({"a": _Calls()}, 4),
        b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.",
        # States that would be set on the classes or the functions that a file may name.
        b"\x80\x02ccollections\nOrderedDict\nN" + _SLOTS + b"\x86b.",
        b"\x80\x02" + _REBUILD + b"N" + _SLOTS + b"\x86b.",
        # A place in the memo far behind all others, and values that are not there.
        b"\x80\x02}r\x00\x00\x00\x04.",
        b"\x80\x02h\x07.",
        b"\x80\x02\x87.",
        b"\x80\x02t.",
        b"\x80\x02R.",
        b"\x80\x02}",
        b"\x80\x02)X\x01\x00\x00\x00ax\x01s.",
        # A tensor that reaches beyond its storage, one before it, and one of another storage's numbers.
        b"\x80\x02}X\x01\x00\x00\x00a" + _REBUILD + b"(" + _STORAGE + b"K\x01K\x04\x85K\x01\x85\x89}tRs.",
        b"\x80\x02}X\x01\x00\x00\x00a"
        + _REBUILD
        + b"("
        + _STORAGE
        + b"J\xff\xff\xff\xffK\x02\x85K\x01\x85\x89}tRs.",
    ],
)
def test_hostile_files_do_nothing(
    tmp_path: Path, description: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match=r"it\.pt"):
        read_state(described(tmp_path / "it.pt", description, {"0": bytes(16)}))
    assert capsys.readouterr().out == ""
    # Nothing is set on what it names.
    OrderedDict(a=1)["b"] = 2
    torch.save({"a": torch.ones(2)}, tmp_path / "good.pt")
    assert read_state(tmp_path / "good.pt")["a"].tolist() == [1, 1]


def test_a_storage_takes_memory_once_and_is_as_long_as_it_says(tmp_path: Path) -> None:
    tensor = _REBUILD + b"(" + _STORAGE + b"K\x00K\x04\x85K\x01\x85\x89}tR"
    names = [b"X\x02\x00\x00\x00%02d" % number for number in range(50)]
    path = described(
        tmp_path / "it.pt",
        b"\x80\x02}(" + b"".join(name + tensor for name in names) + b"u.",
        {"0": np.arange(4, dtype="<f4").tobytes()},
    )
    assert len({tensor.start for tensor in state_file(path).tensors}) == 1
    assert len(read_state(path)) == 50
    # 2 ** 29 numbers, said of an entry of 16 bytes.
    large = _REBUILD + b"(" + _STORAGE.replace(b"K\x04", b"J\x00\x00\x00\x20") + b"K\x00"
    large += b"J\x00\x00\x00\x20\x85K\x01\x85\x89}tR"
    description = b"\x80\x02}X\x01\x00\x00\x00a" + large + b"s."
    with pytest.raises(CheckpointError, match="a storage of another length"):
        read_state(described(tmp_path / "large.pt", description, {"0": bytes(16)}))
    with zipfile.ZipFile(tmp_path / "it.pt", "a") as archive:
        archive.writestr("archive/byteorder", b"big")
    with pytest.raises(CheckpointError, match="numbers of another byte order"):
        state_file(path)


def test_other_archives_are_refused(tmp_path: Path) -> None:
    (tmp_path / "it.pt").write_bytes(b"\x80\x02no archive")
    with pytest.raises(CheckpointError, match=r"it\.pt"):
        read_state(tmp_path / "it.pt")
    with zipfile.ZipFile(tmp_path / "it.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
    with pytest.raises(CheckpointError, match="compressed"):
        read_state(tmp_path / "it.pt")
    with pytest.raises(CheckpointError, match="not readable"):
        read_state(tmp_path / "gone.pt")
