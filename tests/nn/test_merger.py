from __future__ import annotations

import pytest
import torch

from tessera.nn.vision import pixel_shuffle


@pytest.mark.parametrize("factor", [1, 2, 3])
def test_shuffle_joins_neighbours(factor: int) -> None:
    edge, channels = 6, 5
    x = torch.arange(2 * edge * edge * channels).reshape(2, edge, edge, channels)
    rows = {
        version: pixel_shuffle(x.reshape(2, edge * edge, channels), factor, version)
        for version in ("v1", "v2")
    }
    short = edge // factor
    assert rows["v2"].shape == (2, short * short, factor * factor * channels)
    for row in range(short):
        for column in range(short):
            patches = [
                x[:, row * factor + down, column * factor + right]
                for down in range(factor)
                for right in range(factor)
            ]
            joined = torch.cat(patches, dim=-1)
            assert torch.equal(rows["v2"][:, row * short + column], joined)
            assert torch.equal(rows["v1"][:, column * short + row], joined)
