from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import tessera
from tessera.checkpoint.fingerprint import fingerprint as of_checkpoint
from tessera.checkpoint.safetensors import WeightFile
from tessera.errors import CheckpointError
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tests.models.changing import changed
from tests.models.llama_nemotron_vl.conftest import MakeCheckpoint

FILES = ("config.json", "processor_config.json", "tokenizer.json", "tokenizer_config.json")


def fingerprint(path: Path) -> str:
    return of_checkpoint(path, revision=b"llama_nemotron_vl 2", files=FILES)


def test_of_the_demonstration_checkpoint() -> None:
    """Cache keys hold it: it changes when what the model computes changes, and not before."""
    demo = Path(tessera.__file__).parent / "checkpoints" / "tessera-demo"
    assert LlamaNemotronVL(demo).fingerprint == "fd2a427c9d16e1811931bc6ddea0ce78" == fingerprint(demo)


def test_independent_of_place_and_time(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint()
    copy = changed(source, tmp_path / "copy")
    os.utime(copy / "model.safetensors", (0, 0))
    (copy / "README.md").write_text("anything")
    assert fingerprint(copy) == fingerprint(source)
    assert len(fingerprint(source)) == 32


@pytest.mark.parametrize("name", FILES)
def test_every_file_counts(make_checkpoint: MakeCheckpoint, tmp_path: Path, name: str) -> None:
    copy = changed(make_checkpoint(), tmp_path / "copy")
    before = fingerprint(copy)
    (copy / name).write_text((copy / name).read_text() + " ")
    assert fingerprint(copy) != before


def test_weights_seeds_types_and_shards_count(make_checkpoint: MakeCheckpoint) -> None:
    paths = [
        make_checkpoint(),
        make_checkpoint(seed=1),
        make_checkpoint(dtype="bfloat16"),
        make_checkpoint(shards=2),
    ]
    assert len({fingerprint(path) for path in paths}) == len(paths)


def test_the_ends_and_middle_of_every_tensor_count(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    copy = changed(make_checkpoint(), tmp_path / "copy")
    path = copy / "model.safetensors"
    before = fingerprint(copy)
    original = path.read_bytes()
    tensors = WeightFile.read(path).tensors
    for tensor in (tensors[0], tensors[len(tensors) // 2], tensors[-1]):
        for offset in (0, tensor.nbytes // 2, tensor.nbytes - 1):
            other = bytearray(original)
            other[tensor.start + offset] ^= 1
            path.write_bytes(other)
            assert fingerprint(copy) != before


def test_without_weights(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    shutil.copy(make_checkpoint() / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        fingerprint(tmp_path)
