"""``python -m training.evaluate --url URL``: how well a running service retrieves in the synthetic world.

Makes held-out pictures, captions and queries, asks the service for their vectors as any client does, prints
one line for each figure, and exits with 1 if one is below what the demonstration model must reach.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

import httpx2
import numpy as np
from PIL import Image

from training.client import REQUESTS, Client, Input, Vectors
from training.render.picture import as_jpeg, as_png, draw, encode, half_size
from training.world.compositions import Composition, Page, key, written
from training.world.grammar import ask_for, describe, pick_words
from training.world.notes import Note, add, sample_note, write
from training.world.sampling import sample


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured share and the least it must be."""

    name: str
    value: float
    least: float

    @property
    def good(self) -> bool:
        return self.value >= self.least

    def __str__(self) -> str:
        verdict = "ok" if self.good else "MISSED"
        return f"{self.name:<44}{self.value:8.4f}   must reach {self.least:.2f}   {verdict}"


@dataclass(frozen=True, slots=True)
class World:
    """Held-out compositions, all different, and one image file of each."""

    compositions: tuple[Composition, ...]
    images: tuple[bytes, ...]
    source: random.Random

    @classmethod
    def make(cls, count: int, seed: int) -> World:
        source = random.Random(f"evaluation {seed}")
        found: dict[str, Composition] = {}
        while len(found) < count:
            composition = sample(source, held_out=True)
            found.setdefault(key(composition), composition)
        compositions = tuple(found.values())
        return cls(compositions, tuple(encode(draw(one, source), source) for one in compositions), source)


async def measure(client: Client, world: World, *, variants: int, documents: int) -> list[Figure]:
    """Every figure; ``variants`` images are changed, ``documents`` images get notes, two for each."""
    compositions, images, source = world.compositions, world.images, world.source
    captions = [describe(one, source) for one in compositions]
    shown = await client.embed("images", [Input(image=image) for image in images])
    queries = await client.embed("queries", [Input(text=text) for text in captions], role="query")
    told = await client.embed("captions", [Input(text=text) for text in captions], role="passage")
    own = np.arange(len(images))
    figures = [
        Figure("text to image, recall@1", recall(queries, shown, own, 1), 0.90),
        Figure("text to image, recall@10", recall(queries, shown, own, 10), 0.99),
        Figure("image to text, recall@1", recall(shown, told, own, 1), 0.90),
        Figure("image to text, recall@10", recall(shown, told, own, 10), 0.99),
    ]
    asked, pages = word_queries(compositions, source)
    words = await client.embed("words", [Input(text=text) for text in asked], role="query")
    figures.append(Figure("text to page by words on it, recall@1", recall(words, shown, pages, 1), 0.85))
    figures += await _documents(client, world, documents)
    for name, changed in (("JPEG 70", jpeg_70), ("half size", halved)):
        again = await client.embed(name, [Input(image=changed(image)) for image in images[:variants]])
        figures.append(
            Figure(f"{name}: own nearest neighbour", recall(again, shown, own[:variants], 1), 0.99)
        )
    return figures


async def _documents(client: Client, world: World, count: int) -> list[Figure]:
    """Documents of an image and a note, two notes for each image and two images for each note."""
    source = world.source
    chosen = source.sample(range(len(world.images)), count // 2 * 2)
    pairs: list[tuple[int, Note]] = []
    for one, other in zip(chosen[::2], chosen[1::2], strict=True):
        first, second = sample_note(source), sample_note(source)
        while second == first:
            second = sample_note(source)
        pairs += [(image, note) for image in (one, other) for note in (first, second)]
    texts = [write(note, source) for _, note in pairs]
    images = [world.images[image] for image, _ in pairs]
    queries = [add(describe(world.compositions[image], source), note, source) for image, note in pairs]
    asked = await client.embed("narrowed queries", [Input(text=text) for text in queries], role="query")
    forms = {
        "image and note": [Input(text=text, image=image) for text, image in zip(texts, images, strict=True)],
        "image alone": [Input(image=image) for image in images],
        "note alone": [Input(text=text) for text in texts],
    }
    recalls = {}
    for name, inputs in forms.items():
        vectors = await client.embed(name, inputs, role="passage")
        recalls[name] = recall(asked, vectors, np.arange(len(pairs)), 1)
    alone = max(recalls["image alone"], recalls["note alone"])
    return [
        Figure("document by image and note, recall@1", recalls["image and note"], 0.90),
        Figure("  its lead over image alone", recalls["image and note"] - recalls["image alone"], 0.20),
        Figure("  its lead over note alone", recalls["image and note"] - recalls["note alone"], 0.20),
        Figure("  better than either", float(recalls["image and note"] > alone), 1.0),
    ]


def recall(queries: Vectors, items: Vectors, own: np.ndarray, first: int) -> float:
    """Share of queries whose item ``own`` is among the ``first``; among equals, its expected share."""
    scores = queries @ items.T
    mine = scores[np.arange(len(own)), own][:, None]
    equal = np.abs(scores - mine) < 1e-5
    before = ((scores > mine) & ~equal).sum(1)
    return float(np.clip((first - before) / equal.sum(1), 0, 1).mean())


def word_queries(compositions: Sequence[Composition], source: random.Random) -> tuple[list[str], np.ndarray]:
    """For each page a query for words that no other picture has together, and the pages' numbers.

    Two to four words, drawn again up to ten times while they also stand on another page, chart or table:
    each query has exactly one right answer. A page without such words is left out: among many, those
    of a single word.
    """
    held = [written(one) for one in compositions]
    queries, pages = [], []
    for number, page in enumerate(compositions):
        if not isinstance(page, Page):
            continue
        for _ in range(10):
            picked = pick_words(page, source)
            if sum(words.issuperset(picked) for words in held) == 1:
                queries.append(ask_for(picked, source))
                pages.append(number)
                break
    return queries, np.array(pages, dtype=np.int64)


def jpeg_70(data: bytes) -> bytes:
    with Image.open(BytesIO(data)) as image:
        return as_jpeg(image.convert("RGB"), 70)


def halved(data: bytes) -> bytes:
    with Image.open(BytesIO(data)) as image:
        return as_png(half_size(image.convert("RGB")))


async def run(options: argparse.Namespace) -> list[Figure]:
    world = World.make(options.count, options.seed)
    async with httpx2.AsyncClient(timeout=600) as http:
        told = {"progress": not options.quiet, "requests": options.requests}
        client = Client(http, options.url, options.model, **told)
        figures = await measure(client, world, variants=options.variants, documents=options.documents)
        if options.other_url:
            other = Client(http, options.other_url, options.model, **told)
            inputs = [Input(image=image) for image in world.images[: options.variants]]
            own = np.arange(len(inputs))
            here = await client.embed("this service", inputs)
            there = await other.embed("the other service", inputs)
            figures.append(Figure("other transport: own neighbour", recall(there, here, own, 1), 1.0))
            figures.append(Figure("  least cosine", float((here * there).sum(1).min()), 0.999))
    return figures


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--other-url", help="a second service, with another transport, that must agree")
    parser.add_argument("--model", default="tessera-demo", help="the served name")
    parser.add_argument("--count", type=int, default=1000, help="held-out compositions")
    parser.add_argument("--variants", type=int, default=1000, help="images to re-encode and to halve")
    parser.add_argument("--documents", type=int, default=100, help="images that get notes")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    figures = asyncio.run(run(parse(arguments)))
    for figure in figures:
        print(figure)
    sys.exit(0 if all(figure.good for figure in figures) else 1)


if __name__ == "__main__":
    main()
