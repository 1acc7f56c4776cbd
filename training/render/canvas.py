"""The ground a picture is drawn on: its size, its colours and its texture."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from training.world.words import COLOURS

Colour = tuple[int, int, int]

_SMALLEST = 160


@dataclass(frozen=True, slots=True)
class Style:
    """What the canvas and everything on it share."""

    width: int
    height: int
    source: random.Random

    @property
    def short(self) -> int:
        return min(self.width, self.height)


@dataclass(frozen=True, slots=True)
class Canvases:
    """What canvases there are: ``edges`` of squares of their area with weights, and the widest aspect."""

    edges: tuple[tuple[int, float], ...]
    widest: float


ANY = Canvases(edges=((232, 0.5), (320, 0.2), (416, 0.17), (512, 0.13)), widest=3.0)
ONE_TILE = Canvases(edges=((232, 0.5), (280, 0.5)), widest=1.1)
"""So small and so nearly square that an image is one tile of 256 pixels, without a thumbnail."""


def random_style(source: random.Random, canvases: Canvases, *, least: int = 0, widest: float = 3.0) -> Style:
    """A canvas with at least the area of a square of edge ``least``, no wider than 1:``widest``."""
    edges, weights = zip(*((max(edge, least), weight) for edge, weight in canvases.edges), strict=True)
    edge = source.choices(edges, weights)[0] * source.uniform(0.92, 1.12)
    aspect = min(widest, canvases.widest, _aspect(source))
    if source.random() < 0.5:
        aspect = 1 / aspect
    width, height = edge * aspect**0.5, edge / aspect**0.5
    scale = max(1.0, _SMALLEST / min(width, height))
    return Style(round(width * scale), round(height * scale), source)


def _aspect(source: random.Random) -> float:
    """Longer over shorter edge: often near 1, 2 and 3, which few tiles cover, and sometimes in between."""
    near = source.choices((1, 2, 3, 0), (0.4, 0.25, 0.15, 0.2))[0]
    if near == 0:
        return float(3.0 ** source.random())
    return {1: source.uniform(1.0, 1.16), 2: source.uniform(1.8, 2.3), 3: source.uniform(2.6, 3.0)}[near]


def contrasting(source: random.Random, *others: Colour, least: float = 120.0) -> Colour:
    """A ground colour that stands out from all ``others``; paper white or ink if nothing else does."""
    for _ in range(30):
        grey = source.randint(0, 255)
        spread = source.choice((0, 25, 60))
        found = tuple(min(255, max(0, grey + source.randint(-spread, spread))) for _ in range(3))
        if all(distance(found, other) >= least for other in others):
            return (found[0], found[1], found[2])
    grounds: tuple[Colour, ...] = ((255, 255, 255), (0, 0, 0), (128, 128, 128), (180, 220, 240), (90, 60, 90))
    return max(grounds, key=lambda ground: min(distance(ground, other) for other in others))


def distance(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """Euclidean in RGB: crude, but enough to keep things apart."""
    return float(sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5)


def varied(name: str, source: random.Random) -> Colour:
    """A shade of the named colour, near enough to be called by its name."""
    red, green, blue = COLOURS[name]
    shift = source.randint(-12, 12)
    shade = [min(255, max(0, value + shift + source.randint(-8, 8))) for value in (red, green, blue)]
    return (shade[0], shade[1], shade[2])


def ground(style: Style, colour: Colour) -> Image.Image:
    """An RGB canvas in ``colour``: plain, shaded, blotched, striped or checked, always faintly."""
    source, size = style.source, (style.width, style.height)
    kind = source.choice(("plain", "plain", "shaded", "blotched", "striped", "checked"))
    if kind == "plain":
        return Image.new("RGB", size, colour)
    strength = source.randint(6, 20)
    if kind in ("shaded", "blotched"):
        cells = (2, 2) if kind == "shaded" else (source.randint(3, 8), source.randint(3, 8))
        pixels = np.array(
            [
                [_nudged(colour, source.randint(-strength, strength)) for _ in range(cells[0])]
                for _ in range(cells[1])
            ],
            dtype=np.uint8,
        )
        return Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR)
    canvas = Image.new("RGB", size, colour)
    draw = ImageDraw.Draw(canvas)
    other = _nudged(colour, source.choice((-strength, strength)))
    step = source.randint(10, 40)
    if kind == "striped":
        upright = source.random() < 0.5
        for start in range(0, max(size), 2 * step):
            box = (start, 0, start + step, size[1]) if upright else (0, start, size[0], start + step)
            draw.rectangle(box, fill=other)
        return canvas
    for top in range(0, size[1], step):
        for left in range((top // step % 2) * step, size[0], 2 * step):
            draw.rectangle((left, top, left + step, top + step), fill=other)
    return canvas


def _nudged(colour: Colour, by: int) -> Colour:
    red, green, blue = (min(255, max(0, value + by)) for value in colour)
    return (red, green, blue)
