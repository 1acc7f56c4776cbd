"""Packed batches padded to the sizes of recorded graphs, with recording and replaying done on the host."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from tessera.engine.graphs import Graphs, graph_sizes
from tessera.engine.torch.cuda import sequence_room
from tests.tessera_engines.tensorrt_standin import HostStreams

WIDTH = 4
SIZES = graph_sizes(100)


def buffers(most: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Full of what a replay must not see: two with a row for each token, and three rows of positions."""
    return (torch.full((most, WIDTH), 9.0), torch.full((most,), 9.0)), torch.full(
        (3, most), 9, dtype=torch.int32
    )


def sums(rows: tuple[torch.Tensor, ...], positions: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    values, factors = rows
    weighted = values * factors[:, None] * (positions[0] + 10 * positions[1] - positions[2])[:, None]
    return torch.stack([weighted[start:end].sum(0) for start, end in pairwise(bounds)])


def by_bounds(rows: tuple[torch.Tensor, ...], positions: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    return sums(rows, positions, bounds.tolist())


def by_ends(rows: tuple[torch.Tensor, ...], positions: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return sums(rows, positions, [0, *ends.tolist()])


@pytest.mark.parametrize("ends_only", [False, True])
def test_replays_see_their_own_rows_positions_and_bounds(ends_only: bool) -> None:
    streams = HostStreams()
    graphs = Graphs(
        by_ends if ends_only else by_bounds,
        *buffers(SIZES[-1]),
        sizes=SIZES,
        room=lambda size: 9,
        streams=streams,
        ends_only=ends_only,
    )
    chance = np.random.default_rng(0)
    batches = [[3], [40, 1, 9], [100], [7] * 9, [2, 2]]
    for number, lengths in enumerate(batches, start=1):
        total = sum(lengths)
        rows = (
            torch.from_numpy(chance.standard_normal((total, WIDTH), dtype=np.float32)),
            torch.from_numpy(chance.standard_normal(total, dtype=np.float32)),
        )
        positions = torch.from_numpy(chance.integers(0, 9, (3, total), dtype=np.int32))
        bounds = np.cumsum([0, *lengths]).astype(np.int32)
        assert graphs.fits(total, len(lengths))
        given = graphs.bounds(bounds)
        assert given.dtype == np.int32 and len(given) == (9 if ends_only else 10)
        found = graphs.replay(rows, positions, torch.from_numpy(given))
        expected = by_bounds(rows, positions, torch.from_numpy(bounds))
        torch.testing.assert_close(found[: len(lengths)], expected)
        assert streams.replayed == number
    assert not graphs.fits(101, 1) and not graphs.fits(20, 10)


def test_rows_may_be_fewer_than_the_batch_and_positions_none() -> None:
    streams = HostStreams()
    rows = (torch.zeros(4, WIDTH), torch.zeros(4))
    graphs = Graphs(
        lambda rows, positions, bounds: rows[0].sum(0, keepdim=True) + rows[1].sum(),
        rows,
        torch.zeros(0, 4, dtype=torch.int32),
        sizes=[1, 2, 3, 4],
        room=lambda size: size,
        streams=streams,
    )
    bounds = torch.from_numpy(graphs.bounds(np.array([0, 3], np.int32)))
    assert bounds.tolist() == [0, 3, 3, 3]
    given = (torch.ones(3, WIDTH), torch.ones(1))
    found = graphs.replay(given, torch.empty(0, 3, dtype=torch.int32), bounds)
    assert found.tolist() == [[4.0] * WIDTH]
    assert graphs.fits(4, 4) and not graphs.fits(3, 4) and not graphs.fits(5, 1)


def test_a_graph_of_tokens_has_room_for_sequences_of_32() -> None:
    assert [sequence_room(tokens) for tokens in (32, 512, 1024, 4096)] == [16, 16, 32, 128]
    assert graph_sizes(1024)[:3] == [32, 64, 96] and graph_sizes(1024)[-1] == 1024
