from __future__ import annotations

import dataclasses
import random

import pytest

from tessera.models.llama_nemotron_vl.config import ImageConfig
from tessera.models.llama_nemotron_vl.images import candidates, choose_grid, count_tiles
from tests.references.llama_nemotron_vl import GRIDS
from tests.references.llama_nemotron_vl import grid as reference_grid

HALVES = (0.5, 0.5, 0.5)
SIX = ImageConfig(
    tile_size=512, min_tiles=1, max_tiles=6, dynamic=True, thumbnail=True, mean=HALVES, std=HALVES
)

TABLE = [
    ((512, 512), (1, 1), 1),
    ((640, 480), (3, 2), 7),
    ((480, 640), (2, 3), 7),
    ((1275, 1650), (2, 3), 7),
    ((1920, 1080), (3, 2), 7),
    ((1280, 680), (2, 1), 3),
    ((1024, 1024), (2, 2), 5),
    ((2048, 2048), (2, 2), 5),
    ((1000, 300), (3, 1), 4),
    ((300, 1000), (1, 3), 4),
    ((3000, 500), (6, 1), 7),
    ((500, 3000), (1, 6), 7),
    ((336, 336), (1, 1), 1),
]


@pytest.mark.parametrize(("size", "grid", "tiles"), TABLE)
def test_published_sizes(size: tuple[int, int], grid: tuple[int, int], tiles: int) -> None:
    assert choose_grid(*size, SIX) == grid
    assert count_tiles(*size, SIX) == tiles


@pytest.mark.parametrize(("most", "grid", "tiles"), [(2, (1, 2), 3), (4, (2, 2), 5), (6, (2, 3), 7)])
def test_a_page_under_each_limit(most: int, grid: tuple[int, int], tiles: int) -> None:
    image = dataclasses.replace(SIX, max_tiles=most)
    assert choose_grid(1275, 1650, image) == grid
    assert count_tiles(1275, 1650, image) == tiles


def test_order_of_candidates_is_the_published_one() -> None:
    assert list(candidates(1, 6)) == GRIDS


@pytest.mark.parametrize("most", [1, 2, 4, 6])
def test_every_size_agrees_with_the_reference(most: int) -> None:
    image = dataclasses.replace(SIX, max_tiles=most)
    source = random.Random(most)
    sizes = [(source.randint(1, 5000), source.randint(1, 5000)) for _ in range(2000)]
    sizes += [(512 * i, 512 * j) for i in range(1, 9) for j in range(1, 9)]
    for size in [(1, 1), (1, 65535), (65535, 1), *sizes]:
        assert choose_grid(*size, image) == reference_grid(*size, 512, most), size


def test_no_thumbnail_and_no_tiling() -> None:
    assert count_tiles(1275, 1650, dataclasses.replace(SIX, thumbnail=False)) == 6
    assert count_tiles(1275, 1650, dataclasses.replace(SIX, dynamic=False)) == 1


def test_at_least_so_many_tiles() -> None:
    assert choose_grid(10, 10, dataclasses.replace(SIX, min_tiles=4)) == (2, 2)
