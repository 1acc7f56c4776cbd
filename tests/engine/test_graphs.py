"""Text batches padded to the sizes of recorded graphs, with recording and replaying done on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tessera.engine.graphs import TextGraphs, graph_sizes
from tests.engine.tensorrt_standin import HostStreams

WIDTH = 4


def inputs(tokens: int) -> tuple[torch.Tensor, ...]:
    return torch.full((tokens, WIDTH), 9.0), torch.full((tokens,), 9, dtype=torch.int32)


def sums(values: torch.Tensor, positions: torch.Tensor, starts: list[int], ends: list[int]) -> torch.Tensor:
    weighted = values * positions[:, None]
    return torch.stack([weighted[start:end].sum(0) for start, end in zip(starts, ends, strict=True)])


def by_bounds(values: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    bounds = cu_seqlens.tolist()
    return sums(values, positions, bounds[:-1], bounds[1:])


def by_ends(values: torch.Tensor, positions: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    bounds = [0, *ends.tolist()]
    return sums(values, positions, bounds[:-1], bounds[1:])


@pytest.mark.parametrize("ends_only", [False, True])
def test_replays_see_their_own_tokens_and_lengths(ends_only: bool) -> None:
    streams = HostStreams()
    graphs = TextGraphs(
        by_ends if ends_only else by_bounds,
        inputs,
        streams=streams,
        device="cpu",
        max_tokens=100,
        max_sequences=9,
        ends_only=ends_only,
    )
    chance = np.random.default_rng(0)
    batches = [[3], [40, 1, 9], [100], [7] * 9, [2, 2]]
    for number, lengths in enumerate(batches, start=1):
        values = torch.from_numpy(chance.standard_normal((sum(lengths), WIDTH), dtype=np.float32))
        positions = torch.from_numpy(chance.integers(0, 9, sum(lengths), dtype=np.int32))
        cu_seqlens = torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32))
        assert graphs.fits(sum(lengths), len(lengths))
        found = graphs.replay(values, positions, cu_seqlens=cu_seqlens)
        torch.testing.assert_close(found, by_bounds(values, positions, cu_seqlens))
        assert streams.replayed == number
    assert not graphs.fits(101, 1) and not graphs.fits(20, 10)


def test_a_graph_without_a_limit_has_room_for_sequences_of_32_tokens() -> None:
    graphs = TextGraphs(by_bounds, inputs, streams=HostStreams(), device="cpu", max_tokens=1024)
    assert graphs.fits(20, 16) and not graphs.fits(20, 17)
    assert graphs.fits(1024, 32) and not graphs.fits(1024, 33)
    assert graph_sizes(1024)[:3] == [32, 64, 96] and graph_sizes(1024)[-1] == 1024
