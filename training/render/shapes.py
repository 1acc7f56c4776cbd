"""The outlines of the shapes, as polygons inside the unit circle around the origin (y points down)."""

from __future__ import annotations

import math
from functools import cache

from PIL import ImageDraw

from training.render.canvas import Colour

Point = tuple[float, float]

_RING = 0.6
"""Inner over outer radius of a ring."""


def draw_shape(
    draw: ImageDraw.ImageDraw,
    shape: str,
    centre: Point,
    radius: float,
    turn: float,
    colour: Colour,
) -> None:
    """Fill ``shape`` of ``radius`` pixels around ``centre``, turned by ``turn`` radians."""
    cosine, sine = math.cos(turn), math.sin(turn)
    x, y = centre
    if shape in ("circle", "ring"):
        box = (x - radius, y - radius, x + radius, y + radius)
        if shape == "circle":
            draw.ellipse(box, fill=colour)
        else:
            draw.ellipse(box, outline=colour, width=max(2, round(radius * (1 - _RING))))
        return
    points = [
        (x + radius * (px * cosine - py * sine), y + radius * (px * sine + py * cosine))
        for px, py in outline(shape)
    ]
    draw.polygon(points, fill=colour)


def inner_radius(shape: str) -> float:
    """The radius of a circle around the origin that lies inside the shape, 1 being the shape's own."""
    return _INNER[shape]


_INNER = {
    "circle": 0.9, "square": 0.62, "triangle": 0.42, "star": 0.4, "diamond": 0.5, "hexagon": 0.75,
    "heart": 0.5, "cross": 0.3, "ring": 0.52, "crescent": 0.3, "arrow": 0.3, "half circle": 0.35,
}  # fmt: skip


@cache
def outline(shape: str) -> tuple[Point, ...]:
    """The corners of a filled shape."""
    if shape == "square":
        return _regular(4, math.pi / 4)
    if shape == "triangle":
        return _regular(3, -math.pi / 2)
    if shape == "hexagon":
        return _regular(6, 0.0)
    if shape == "diamond":
        return ((0.0, -1.0), (0.62, 0.0), (0.0, 1.0), (-0.62, 0.0))
    if shape == "star":
        return tuple(
            _polar(1.0 if corner % 2 == 0 else 0.42, -math.pi / 2 + corner * math.pi / 5)
            for corner in range(10)
        )
    if shape == "cross":
        arm = 0.32
        return (
            (-arm, -1), (arm, -1), (arm, -arm), (1, -arm), (1, arm), (arm, arm),
            (arm, 1), (-arm, 1), (-arm, arm), (-1, arm), (-1, -arm), (-arm, -arm),
        )  # fmt: skip
    if shape == "arrow":
        return ((-1, -0.3), (0.1, -0.3), (0.1, -0.8), (1, 0), (0.1, 0.8), (0.1, 0.3), (-1, 0.3))
    if shape == "half circle":
        return tuple(_polar(1.0, math.pi + step * math.pi / 24) for step in range(25))
    if shape == "crescent":
        outer = [_polar(1.0, math.pi / 3 + step * math.pi * 4 / 3 / 32) for step in range(33)]
        start, end = outer[-1], outer[0]
        inner = [_between(start, end, step / 16) for step in range(1, 16)]
        return (*outer, *inner)
    if shape == "heart":
        return tuple(_heart(step * 2 * math.pi / 40) for step in range(40))
    raise ValueError(f"no shape is called {shape!r}")


def _regular(corners: int, start: float) -> tuple[Point, ...]:
    return tuple(_polar(1.0, start + corner * 2 * math.pi / corners) for corner in range(corners))


def _polar(radius: float, angle: float) -> Point:
    return (radius * math.cos(angle), radius * math.sin(angle))


def _between(start: Point, end: Point, share: float) -> Point:
    """The inner edge of the crescent: an arc that bends towards the outer one."""
    bend = -0.75 * math.sin(share * math.pi)
    return (start[0] + (end[0] - start[0]) * share + bend, start[1] + (end[1] - start[1]) * share)


def _heart(angle: float) -> Point:
    """The well-known curve of sines and cosines, scaled into the unit circle."""
    x = 16 * math.sin(angle) ** 3
    y = 13 * math.cos(angle) - 5 * math.cos(2 * angle) - 2 * math.cos(3 * angle) - math.cos(4 * angle)
    return (x / 17, -(y + 2.5) / 17)
