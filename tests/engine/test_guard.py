"""Engines' errors, told apart by the exceptions that torch really raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera.engine.batch import TextBatch, VisionBatch, packed_cost
from tessera.engine.guard import GuardedTextEngine, GuardedVisionEngine
from tessera.engine.placement import Placement
from tessera.errors import EngineDead, EngineFailed, InvalidInput
from tessera.launched import Launched
from tessera.rows import Rows
from tests.families.dual_encoder import HIDDEN, DualEncoder

MODEL = DualEncoder(Path(), 0)
HERE = Placement(device="cpu", dtype="float32")


@dataclass
class Raises:
    """An engine that raises on launch, or when its result is asked for."""

    error: Exception
    late: bool
    cost: Callable[[int, int, int], int] = packed_cost
    depth: int = 1
    takes_floats: bool = True
    gives: tuple[str, ...] = ()

    def warm(self) -> None: ...

    def close(self) -> None: ...

    def result(self) -> Any:
        raise self.error

    def launch(self, *_: object) -> Any:
        if not self.late:
            raise self.error
        return Launched(self.result)

    launch_named = launch


def caught(error: Exception, late: bool, kind: Any) -> Exception:
    engine = kind(Raises(error, late), MODEL, *([HERE] if kind is GuardedVisionEngine else []))
    arguments = ([], []) if kind is GuardedVisionEngine else (None,)
    with pytest.raises(Exception) as found:
        engine.launch(*arguments).result()
    return found.value


@pytest.mark.parametrize("late", [False, True], ids=["on launch", "in the result"])
@pytest.mark.parametrize("kind", [GuardedTextEngine, GuardedVisionEngine])
def test_errors_are_told_apart(late: bool, kind: Any) -> None:
    memory = caught(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), late, kind)
    assert type(memory) is EngineFailed and "out of memory" in memory.message
    illegal = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")
    gone = caught(illegal, late, kind)
    assert isinstance(gone, EngineDead)
    assert gone.message == "the device failed: CUDA error: an illegal memory access was encountered"
    older = caught(RuntimeError("CUDA error: unspecified launch failure"), late, kind)
    assert isinstance(older, EngineDead)
    for other in (RuntimeError("shapes differ"), ValueError("no"), InvalidInput("no")):
        assert caught(other, late, kind) is other


def test_results_and_properties_pass_through() -> None:
    class Works(Raises):
        def launch(self, *_: object) -> Any:
            return Launched.of("made")

    engine = GuardedTextEngine(Works(RuntimeError(), late=False, depth=2), MODEL)  # type: ignore[arg-type]
    launched = engine.launch(None)  # type: ignore[arg-type]
    assert launched.done() and launched.result() == "made"
    assert (engine.depth, engine.cost) == (2, packed_cost)


@dataclass
class Gives(Raises):
    """An engine whose every value is ``value``, and every length ``norm``."""

    value: float = 1.0
    norm: float = 1.0

    def launch(self, batch: Any, out: Sequence[torch.Tensor] = ()) -> Any:
        if isinstance(batch, VisionBatch):
            for rows in out:
                rows.fill_(self.value)
            return Launched.of(None)
        assert isinstance(batch, TextBatch)
        count = len(batch.lengths)
        return Launched.of(
            Rows(
                np.full((count, HIDDEN), self.value, np.float32),
                np.arange(count + 1),
                np.full(count, self.norm, np.float32),
            )
        )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_an_engine_that_gives_no_numbers_is_not_warm(value: float) -> None:
    for engine, stage in (
        (GuardedTextEngine(Gives(RuntimeError(), False, value=value), MODEL), "text"),
        (GuardedTextEngine(Gives(RuntimeError(), False, norm=value), MODEL), "text"),
        (GuardedVisionEngine(Gives(RuntimeError(), False, value=value), MODEL, HERE), "vision"),
    ):
        with pytest.raises(EngineFailed, match=f"the {stage} engine gave outputs that are not finite"):
            engine.warm()
    GuardedTextEngine(Gives(RuntimeError(), False), MODEL).warm()
    GuardedVisionEngine(Gives(RuntimeError(), False), MODEL, HERE).warm()
