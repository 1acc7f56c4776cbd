"""Checkpoints whose weights ``torch.save`` wrote are served with the vectors of those in safetensors.

bge-m3 is published so, and so are modules of older models and adapters.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tessera.checkpoint.source import is_adapter
from tessera.checkpoint.weights import weight_sizes
from tessera.errors import CheckpointError
from tessera.models import open_model
from tessera.models.base import Model
from tessera_tools.random_checkpoint.encoder import M3_TINY, TINY
from tests.models.adapting import adapt, linked, low_rank
from tests.models.conftest import WriteCheckpoint
from tests.models.declaring import Module, declare, dense
from tests.models.running import Given, batch_of, vectors
from tests.models.test_adapter import QUERY, VALUE

CASES = [Given(parts=(text,)) for text in ("river", "the bridge by the old temple", "été naïve 東京 " * 9)]
POOLED = Module("Pooling", {"embedding_dimension": TINY.hidden, "pooling_mode": "mean"})


def embedded(model: Model, dtype: str = "float32") -> np.ndarray:
    return vectors(model, model.load_text(dtype=dtype, device="cpu"), batch_of(model, None, CASES))


def state_of(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, with the buffer that BERT's states had for years."""
    return {**load_file(path), "embeddings.position_ids": torch.arange(512)[None]}


def pickled(source: Path, target: Path, *, shards: int = 1) -> Path:
    """Link a checkpoint's files, with every weight file as ``torch.save`` writes it."""
    for file in linked(source, target).rglob("*.safetensors"):
        state, folder = state_of(file), file.parent
        name = "adapter_model.bin" if file.name.startswith("adapter") else "pytorch_model.bin"
        file.unlink()
        if name.startswith("adapter") or folder != target:
            state.pop("embeddings.position_ids")
            torch.save(state, folder / name)
        elif shards == 1:
            torch.save(state, folder / name)
        else:
            placed = {}
            for number in range(shards):
                shard = f"pytorch_model-{number + 1:05}-of-{shards:05}.bin"
                part = dict(list(state.items())[number::shards])
                torch.save(part, folder / shard)
                placed |= dict.fromkeys(part, shard)
            (folder / f"{name}.index.json").write_text(json.dumps({"weight_map": placed}))
    assert not list(target.rglob("*.safetensors"))
    return target


@pytest.mark.parametrize("shards", [1, 3])
def test_vectors_are_those_of_safetensors(written: WriteCheckpoint, tmp_path: Path, shards: int) -> None:
    second = dense(TINY.hidden, 16)
    source = declare(written(TINY), tmp_path / "source", POOLED, second, Module("Normalize"))
    path = pickled(source, tmp_path / "pickled", shards=shards)
    plain, other = open_model(source), open_model(path)
    for dtype in ("float32", "bfloat16"):
        assert np.array_equal(embedded(other, dtype), embedded(plain, dtype))
    assert len(weight_sizes(path)) == shards
    fingerprints = {plain.fingerprint, other.fingerprint}
    files = list(path.rglob("pytorch_model*.bin"))
    for file in files:
        state = torch.load(file, weights_only=True)
        name = next(name for name in state if "position_ids" not in name)
        torch.save({**state, name: state[name] + 1}, file)
        fingerprints.add(open_model(path).fingerprint)
    assert len(fingerprints) == 2 + len(files) == 3 + shards


def test_safetensors_win_and_the_others_are_not_opened(written: WriteCheckpoint, tmp_path: Path) -> None:
    path = linked(
        declare(written(TINY), tmp_path / "source", POOLED, dense(TINY.hidden, 16)), tmp_path / "path"
    )
    expected, fingerprint = embedded(open_model(path)), open_model(path).fingerprint
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json", "2_Dense/pytorch_model.bin"):
        (path / name).write_bytes(b"no state")
    assert np.array_equal(embedded(open_model(path)), expected)
    assert open_model(path).fingerprint == fingerprint


def test_an_adapter_may_be_a_state(written: WriteCheckpoint, tmp_path: Path) -> None:
    tensors = low_rank(QUERY, TINY.hidden, TINY.hidden) | low_rank(VALUE, TINY.hidden, TINY.hidden, seed=1)
    source = adapt(written(TINY), tmp_path / "source", tensors)
    path = pickled(source, tmp_path / "pickled")
    assert not is_adapter(path)
    assert np.array_equal(embedded(open_model(path)), embedded(open_model(source)))
    assert not np.allclose(embedded(open_model(path)), embedded(open_model(written(TINY))), atol=1e-3)
    (path / "pytorch_model.bin").unlink()
    assert is_adapter(path)
    (path / "adapter_model.bin").unlink()
    (path / "model.safetensors").symlink_to(written(TINY) / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors or adapter_model\.bin; no other"):
        embedded(open_model(path))


def test_bge_m3_as_it_is_published(written: WriteCheckpoint, tmp_path: Path) -> None:
    """The body in one state, and the heads in files of their own."""
    source = written(M3_TINY)
    path = linked(source, tmp_path / "path", without="model.safetensors")
    state = load_file(source / "model.safetensors")
    torch.save(state, path / "pytorch_model.bin")
    plain, model = open_model(source), open_model(path)
    assert [output.name for output in model.outputs] == [output.name for output in plain.outputs]
    assert np.array_equal(embedded(model), embedded(plain))


def test_an_index_names_states_beside_it_alone(written: WriteCheckpoint, tmp_path: Path) -> None:
    path = pickled(written(TINY), tmp_path / "path", shards=2)
    index = path / "pytorch_model.bin.index.json"
    placed = json.loads(index.read_text())["weight_map"]
    name = next(iter(placed))
    for wrong in ("../pytorch_model-00001-of-00002.bin", "model-00001-of-00002.safetensors"):
        index.write_text(json.dumps({"weight_map": placed | {name: wrong}}))
        with pytest.raises(CheckpointError, match="which is no bin file beside it"):
            embedded(open_model(path))


def test_a_file_that_is_no_state_is_refused_by_name(written: WriteCheckpoint, tmp_path: Path) -> None:
    path = linked(written(TINY), tmp_path / "path", without="model.safetensors")
    (path / "pytorch_model.bin").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(
        CheckpointError, match=r"pytorch_model\.bin: no state of tensors that torch\.save wrote"
    ):
        embedded(open_model(path))
