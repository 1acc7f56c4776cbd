"""A warm-up and a small batch keep to one thread on the CPU; a larger one has all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tessera.engine.batch import PackedInput, TextBatch, pack
from tessera.engine.placement import place
from tessera.engine.settings import EngineSettings
from tessera.engine.threads import fewest_rows, one_thread
from tessera.engine.torch.text import TorchTextEngine
from tessera.models import open_model
from tessera.models.base import TextTensors
from tests.torch_threads import torch_threads


class Watched(nn.Module):
    """A module that notes the number of threads it is called with."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inside = module
        self.seen: list[int] = []

    def forward(self, batch: TextTensors) -> torch.Tensor:
        self.seen.append(torch.get_num_threads())
        computed: torch.Tensor = self.inside(batch)
        return computed


@pytest.fixture
def watched(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TorchTextEngine, Watched]]:
    """An engine on two threads that shares what has 100 tokens or more, and its module."""
    model = open_model(checkpoint)
    module = Watched(model.load_text(dtype="float32", device="cpu"))
    monkeypatch.setattr(TorchTextEngine, "_load", lambda *_: module)
    monkeypatch.setattr("tessera.engine.torch.text.fewest_rows", lambda _: 100)
    settings = EngineSettings(engine="torch", max_batch_cost=4096, max_queue_cost=8192)
    with torch_threads(2):
        engine = TorchTextEngine(model, settings, place(settings))
        yield engine, module
        engine.close()


def batch(tokens: int) -> TextBatch:
    ids = np.random.default_rng(tokens).integers(300, 1000, tokens).astype(np.int32)
    return pack([PackedInput(tokens=ids, positions=np.arange(tokens, dtype=np.int32)[None])])


def on_a_thread(work: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not errors and not thread.is_alive(), errors


def test_one_thread_inside_and_all_again_after_an_error() -> None:
    with torch_threads(3):
        with pytest.raises(ValueError, match="inside"), one_thread():
            assert torch.get_num_threads() == 1
            raise ValueError("inside")
        assert torch.get_num_threads() == 3


def test_small_batches_of_an_engine_run_on_one_thread(watched: tuple[TorchTextEngine, Watched]) -> None:
    engine, module = watched
    engine.warm()
    assert module.seen == [1]

    def run() -> None:
        for tokens in (99, 100, 7, 200):
            engine.launch(batch(tokens)).result()
            assert torch.get_num_threads() == 2

    on_a_thread(run)
    assert module.seen[1:] == [1, 2, 1, 2]


def test_one_thread_gives_the_same_vectors(watched: tuple[TorchTextEngine, Watched]) -> None:
    engine, module = watched
    for tokens in (3, 99):
        alone = engine.launch(batch(tokens)).result().values
        shared = engine._computed(batch(tokens))
        assert module.seen[-2:] == [1, 2]
        shared = shared / np.linalg.norm(shared, axis=1, keepdims=True)
        np.testing.assert_allclose(alone, shared, atol=1e-6)


def test_who_begins_during_a_small_batch_has_all_threads_for_a_large_one(
    watched: tuple[TorchTextEngine, Watched],
) -> None:
    engine, module = watched
    with one_thread():
        # Torch gives a new thread one, too.
        on_a_thread(lambda: engine.launch(batch(200)).result())
    assert module.seen == [2]


def test_all_threads_again_after_an_error(watched: tuple[TorchTextEngine, Watched]) -> None:
    engine, module = watched
    module.inside = nn.Linear(1, 1)
    with pytest.raises(TypeError):
        engine.launch(batch(3)).result()
    assert module.seen == [1] and torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("module", "rows"),
    [
        (nn.Linear(4000, 8000), 1),
        (nn.Linear(500, 400), 50),
        (nn.Sequential(nn.Linear(500, 400), nn.Linear(400, 500), nn.LayerNorm(500)), 50),
        (nn.Sequential(nn.Embedding(100_000, 8), nn.Linear(500, 400)), 50),  # its rows are looked up
        (nn.Sequential(nn.Linear(200, 100), nn.Linear(200, 100), nn.Linear(500, 1120)), 50),
        (nn.LayerNorm(4), 0),
        (object(), 0),
    ],
)
def test_the_larger_the_matrices_the_fewer_rows_are_shared(module: object, rows: int) -> None:
    assert fewest_rows(module) == rows
