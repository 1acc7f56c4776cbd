"""Both stages by the modules and by the engines, with what they read cut into batches."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.card import CardMeter
from benchmarks.stages import CardStages, Precision, Towers, pieces, read, vectors

from tessera.models import open_model
from tessera.models.base import Role
from tests.e2e.inputs import picture
from tests.models.running import cosines

pytestmark = pytest.mark.measures


@pytest.mark.parametrize(
    ("costs", "expected"),
    [([], []), ([9], [[9]]), ([2, 2, 2], [[2, 2], [2]]), ([1, 9, 1, 3, 1], [[1], [9], [1, 3], [1]])],
)
def test_pieces_cost_no_more_than_they_may_or_are_of_one(costs: list[int], expected: list[list[int]]) -> None:
    assert [costs[piece] for piece in pieces(costs, 4)] == expected


def test_engines_give_what_the_modules_give_in_any_batches(checkpoint: Path) -> None:
    """The engines in float32, as this machine has no card."""
    model, precision = open_model(checkpoint), Precision(name="none", model=checkpoint)
    inputs = read(model, ["a yellow heart", picture(1), "two cats", picture(2, 300), "x"], Role.PASSAGE)
    engines = CardStages(model, precision, tokens=64)
    found = vectors(model, engines, inputs)
    assert cosines(found, vectors(model, Towers(model, precision), inputs)).min() > 0.998
    with CardMeter() as meter:
        assert engines.rate(inputs, meter, 0.0).per_second > 0
    engines.close()
