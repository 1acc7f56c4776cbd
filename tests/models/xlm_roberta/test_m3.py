"""BGE M3's dense, sparse and token vectors of one pass, against FlagEmbedding's definition."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera.checkpoint.pickled import read_state
from tessera.engine.batch import PackedInput, pack
from tessera.engine.placement import Placement
from tessera.engine.settings import EngineSettings
from tessera.engine.torch.text import TorchTextEngine
from tessera.errors import CheckpointError
from tessera.models import Model, open_model
from tessera.models.base import Content, OutputKind, Outputs, Truncate
from tessera.rows import Rows
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.encoder import M3_TINY, ROBERTA_TINY
from tests.references.m3 import M3Reference

TEXTS = [
    "the river under the bridge by the old temple",
    "été naïve 東京 the the the",
    "a",
    "a market by the river " * 60,
]
NAMES = ("dense", "sparse", "multivector")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("m3") / "checkpoint"
    write_checkpoint(path, M3_TINY, seed=0)
    return path


@pytest.fixture(scope="module")
def engine(path: Path) -> TorchTextEngine:
    settings = EngineSettings(max_batch_cost=4096, max_queue_cost=100_000)
    return TorchTextEngine(open_model(path), settings, Placement(device="cpu", dtype="float32"))


@pytest.fixture(scope="module")
def reference(path: Path) -> M3Reference:
    return M3Reference(path)


def ids(model: Model, text: str) -> np.ndarray:
    content = Content(parts=(text,))
    return model.prompt(content, max_tokens=512, truncate=Truncate.NONE, param="input").tokens


def run(
    engine: TorchTextEngine, model: Model, tokens: Sequence[np.ndarray], asked: Sequence[tuple[str, ...]]
) -> list[Rows]:
    inputs = [
        PackedInput(tokens=each, positions=model.positions(each, ()), asked=names)
        for each, names in zip(tokens, asked, strict=True)
    ]
    return engine.launch_named(pack(inputs)).result()


def weights_of(rows: Rows) -> dict[int, float]:
    held = rows.held()
    assert held.indices is not None
    return dict(zip(held.indices.tolist(), held.values[:, 0].tolist(), strict=True))


def close(found: dict[int, float], expected: dict[int, float]) -> bool:
    return list(found) == list(expected) and np.allclose(
        list(found.values()), list(expected.values()), atol=1e-5, rtol=0
    )


def test_a_model_with_heads_declares_its_outputs(path: Path) -> None:
    model = open_model(path)
    outputs = Outputs.of_model(model)
    assert [(output.name, output.kind) for output in outputs.declared] == [
        ("dense", OutputKind.VECTOR),
        ("sparse", OutputKind.SPARSE),
        ("multivector", OutputKind.TOKENS),
    ]
    assert model.output is outputs.declared[0]
    assert [output.rows(7) for output in outputs.declared] == [1, 7, 7]


@pytest.mark.parity
def test_the_three_outputs_are_those_of_the_definition(
    path: Path, engine: TorchTextEngine, reference: M3Reference
) -> None:
    model = open_model(path)
    tokens = [ids(model, text) for text in TEXTS]
    # A token without a name of its own, one that is repeated, and special ones inside.
    tokens.append(np.array([0, 9, 3, 2, 9, 1, 700, 9, 2], np.int32))
    for each, rows in zip(tokens, run(engine, model, tokens, [NAMES] * len(tokens)), strict=True):
        given = each.tolist()
        dense, sparse, vectors = rows.each()
        np.testing.assert_allclose(dense.values[0], reference.dense(given), atol=1e-5)
        assert close(weights_of(sparse), reference.weights(given))
        np.testing.assert_allclose(vectors.held().values, reference.vectors(given), atol=1e-5)


@pytest.mark.parity
def test_mistakes_are_seen(path: Path, engine: TorchTextEngine, reference: M3Reference) -> None:
    model = open_model(path)
    tokens = [ids(model, text) for text in TEXTS]
    answers = [rows.each() for rows in run(engine, model, tokens, [NAMES] * len(tokens))]
    found = [weights_of(sparse) for _, sparse, _ in answers]
    given = [each.tolist() for each in tokens]
    assert all(map(close, found, map(reference.weights, given)))
    kept = [reference.weights(each, unused=set()) for each in given]
    assert not all(map(close, found, kept))
    summed = [reference.weights(each, merge=operator.add) for each in given]
    assert not all(map(close, found, summed))
    rows = answers[0][2].held().values
    assert rows.shape == reference.vectors(given[0]).shape
    assert rows.shape != reference.vectors(given[0], last=-1).shape
    assert not np.allclose(rows, reference.vectors(given[0], first=0, last=-1), atol=1e-5)


def test_a_batch_gives_each_input_what_it_asks_for(path: Path, engine: TorchTextEngine) -> None:
    model = open_model(path)
    tokens = [ids(model, text) for text in TEXTS]
    asked = [("sparse",), (), NAMES, ("multivector", "dense")]
    together = run(engine, model, tokens, asked)
    for names, each, rows in zip(asked, tokens, together, strict=True):
        ((alone,), count) = run(engine, model, [each], [names or ("dense",)]), len(names) or 1
        assert len(rows.each()) == count
        for own, expected in zip(rows.each(), alone.each(), strict=True):
            np.testing.assert_allclose(own.values, expected.values, atol=1e-5)
            assert (own.indices is None) is (expected.indices is None)
            if own.indices is not None and expected.indices is not None:
                assert own.indices.tolist() == expected.indices.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_heads_of_each_type_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {"weight": torch.randn(3, 4).to(dtype), "bias": torch.randn(3).to(dtype)}
    torch.save(state, tmp_path / "head.pt")
    read = read_state(tmp_path / "head.pt")
    assert {name: tuple(values.shape) for name, values in read.items()} == {"weight": (3, 4), "bias": (3,)}
    for name, values in read.items():
        assert (torch.from_numpy(np.array(values, np.float32)) == state[name].float()).all()


class _Hostile:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("run",)


def test_what_is_no_state_is_refused_and_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"weight": _Hostile()}, tmp_path / "head.pt")
    with pytest.raises(CheckpointError, match=r"head\.pt"):
        read_state(tmp_path / "head.pt")
    (tmp_path / "head.pt").write_bytes(b"\x80\x02no archive")
    with pytest.raises(CheckpointError, match=r"head\.pt"):
        read_state(tmp_path / "head.pt")
    assert capsys.readouterr().out == ""


def test_heads_of_another_shape_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "it", ROBERTA_TINY, seed=0)
    torch.save({"weight": torch.zeros(2, 128), "bias": torch.zeros(2)}, tmp_path / "it/sparse_linear.pt")
    with pytest.raises(CheckpointError, match=r"sparse_linear\.pt"):
        open_model(tmp_path / "it").load_text(dtype="float32", device="cpu")
