"""What a chunk holds beside its pictures: some of them again, smaller, and nothing else changed by that."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from training.chunks import SIDES, Chunk, Chunks, Recipe

import tessera

DEMO = Path(tessera.__file__).parent / "checkpoints" / "tessera-demo"


def made(*, views: float = 0.0, held_out: bool = False) -> Chunk:
    return Chunks(Recipe(settings=DEMO, seed=3, size=16, uses=2, views=views, held_out=held_out))[0]


def thumbnails(chunk: Chunk) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Images and views as one vector each: their last tiles, which show all of them, in 32 by 32 dots."""
    prompts = chunk.prompts[0]
    vision_rows = 64
    model = Chunks(Recipe(settings=DEMO, seed=3)).model
    counts, first = [], 0
    for length in prompts.lengths:
        ids = prompts.ids[first : first + length]
        first += length
        counts.append(int((ids == model.image_token_id).sum()) // vision_rows)
    bounds = np.cumsum([0, *(prompts.sizes[side] for side in SIDES)])
    sides = dict(zip(SIDES, pairwise(bounds), strict=True))
    ends = np.cumsum(counts)

    def shown(side: str) -> npt.NDArray[np.float64]:
        last = chunk.tiles[prompts.tiles[ends[slice(*sides[side])] - 1]].numpy().astype(np.float64)
        dots = last.reshape(len(last), 3, 32, 8, 32, 8).mean((3, 5)).reshape(len(last), -1)
        dots -= dots.mean(1, keepdims=True)
        normed: npt.NDArray[np.float64] = dots / np.linalg.norm(dots, axis=1, keepdims=True)
        return normed

    return shown("images"), shown("views")


def test_views_show_the_images_that_they_are_said_to_show() -> None:
    for chunk, expected in ((made(views=0.5), 8), (made(held_out=True), 16)):
        images, views = thumbnails(chunk)
        originals = chunk.prompts[0].originals
        assert len(set(originals)) == len(views) == expected
        assert (views @ images.T).argmax(1).tolist() == originals.tolist()


def test_views_change_nothing_else_of_a_chunk() -> None:
    without, with_views = made(), made(views=0.5)
    assert np.array_equal(without.tiles, with_views.tiles[: len(without.tiles)])
    assert len(with_views.tiles) > len(without.tiles)
    for one, other in zip(without.prompts, with_views.prompts, strict=True):
        assert np.array_equal(one.ids, other.ids[: len(one.ids)])
        assert {side: size for side, size in other.sizes.items() if side != "views"} | {
            "views": 0
        } == one.sizes
