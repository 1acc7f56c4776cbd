"""States that torch wrote, and files made by hand that want more than to be read."""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.checkpoint.pickled import read_state
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


@pytest.mark.parametrize(
    "state",
    [
        torch.ones(3),
        {"a": torch.ones(2, 3).T},
        {"a": torch.ones(3, dtype=torch.float64)},
        {"a": torch.ones(3, dtype=torch.int64)},
        {"a": 3},
        {"a": {"b": torch.ones(3)}},
        {3: torch.ones(3)},
        {"a": torch.ones(0)},
    ],
    ids=["tensor", "turned", "float64", "int64", "number", "nested", "number for a name", "empty"],
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


def test_a_storage_is_read_once_and_all_tensors_are_bounded(tmp_path: Path) -> None:
    tensor = _REBUILD + b"(" + _STORAGE + b"K\x00K\x04\x85K\x01\x85\x89}tR"
    names = [b"X\x02\x00\x00\x00%02d" % number for number in range(50)]
    path = described(
        tmp_path / "it.pt",
        b"\x80\x02}(" + b"".join(name + tensor for name in names) + b"u.",
        {"0": np.arange(4, dtype="<f4").tobytes()},
    )
    state = read_state(path)
    assert len(state) == 50 and len({values.__array_interface__["data"] for values in state.values()}) == 1
    # The same storage as 2**28 tensors' worth would be 4 GiB: the numbers are counted before any is read.
    large = _REBUILD + b"(" + _STORAGE.replace(b"K\x04", b"J\x00\x00\x00\x20") + b"K\x00"
    large += b"J\x00\x00\x00\x20\x85K\x01\x85\x89}tR"
    with pytest.raises(CheckpointError, match="more than 1 GiB"):
        read_state(described(tmp_path / "large.pt", b"\x80\x02}X\x01\x00\x00\x00a" + large + b"s."))


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
