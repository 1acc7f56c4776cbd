"""MaxSim against its definition."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tessera.worker.max_sim import MaxSim, max_sim


def unit(random: np.random.Generator, rows: int, width: int) -> np.ndarray:
    made = random.standard_normal((rows, width), np.float32)
    return made / np.linalg.norm(made, axis=1, keepdims=True)


def reference(query: np.ndarray, rows: np.ndarray) -> float:
    return float(np.einsum("id,jd->ij", query.astype(np.float64), rows.astype(np.float64)).max(1).sum())


@pytest.mark.parametrize(
    ("query", "rows", "width"), [(7, 7, 32), (1, 9, 32), (30, 1, 32), (5, 20_000, 8), (30, 400, 128)]
)
async def test_the_sum_of_each_query_rows_best_match(query: int, rows: int, width: int) -> None:
    random = np.random.default_rng(query)
    asked, found = unit(random, query, width), unit(random, rows, width)
    expected = reference(asked, found)
    assert max_sim(asked, found) == pytest.approx(expected, rel=1e-5)
    # On the loop or off it, several at once.
    computing = MaxSim()
    try:
        scores = await asyncio.gather(*(computing.score(asked, found) for _ in range(8)))
        assert scores == pytest.approx([expected] * 8, rel=1e-5)
    finally:
        computing.close()


async def test_scores_are_computed_in_turns_by_key() -> None:
    random, computing, order = np.random.default_rng(0), MaxSim(), list[str]()
    asked, found = unit(random, 30, 128), unit(random, 20_000, 128)

    async def score(client: str) -> None:
        await computing.score(asked, found, client)
        order.append(client)

    try:
        await asyncio.gather(*map(score, ["alice"] * 20 + ["bob"]))
    finally:
        computing.close()
    # On the other thread, beside the first.
    assert order.index("bob") < 3


def test_no_row_of_padding_counts() -> None:
    """With every dot product below zero, a row of zeros beside them would be the best match."""
    query = np.array([[1.0, 0.0]], np.float32)
    assert max_sim(query, np.array([[-0.5, 0.1], [-0.25, 3.0]], np.float32)) == -0.25
