"""Draws scenes and pairs of shapes."""

from __future__ import annotations

import math
import random

from PIL import Image, ImageDraw

from training.render.canvas import Canvases, Colour, Style, contrasting, ground, random_style, varied
from training.render.shapes import Point, draw_shape, inner_radius
from training.world.compositions import Group, Pair, Scene
from training.world.words import PLACES

_OVERSAMPLING = 2
# Arrows, crescents and the like would be another thing upside down, and squares turned are diamonds.
_TURN = 0.2
# How several equal shapes lie in their cell, in halves of its edges.
_CLUSTERS: dict[int, tuple[Point, ...]] = {
    1: ((0.0, 0.0),),
    2: ((-0.45, 0.0), (0.45, 0.0)),
    3: ((-0.48, 0.4), (0.48, 0.4), (0.0, -0.45)),
    4: ((-0.48, -0.46), (0.48, -0.46), (-0.48, 0.46), (0.48, 0.46)),
    5: ((-0.56, -0.56), (0.56, -0.56), (0.0, 0.0), (-0.56, 0.56), (0.56, 0.56)),
}
_CLUSTER_RADII = {2: 0.4, 3: 0.36, 4: 0.36, 5: 0.3}
_SINGLE_RADII = {"small": 0.38, "large": 0.88}


def draw_scene(scene: Scene, source: random.Random, canvases: Canvases) -> Image.Image:
    style = random_style(source, canvases)
    colours = [varied(group.colour, source) for group in scene.groups]
    canvas = ground(style, contrasting(source, *colours))
    layer, draw = _enlarged(canvas)
    for group, colour in zip(scene.groups, colours, strict=True):
        _draw_group(draw, style, group, colour)
    return _reduced(layer, canvas)


def draw_pair(pair: Pair, source: random.Random, canvases: Canvases) -> Image.Image:
    style = random_style(source, canvases)
    colours = (varied(pair.first.colour, source), varied(pair.second.colour, source))
    canvas = ground(style, contrasting(source, *colours))
    layer, draw = _enlarged(canvas)
    if pair.relation == "inside":
        _draw_inside(draw, style, pair, colours)
    else:
        _draw_apart(draw, style, pair, colours)
    return _reduced(layer, canvas)


def _draw_group(draw: ImageDraw.ImageDraw, style: Style, group: Group, colour: Colour) -> None:
    source = style.source
    row, column = divmod(PLACES.index(group.place), 3)
    wide, high = style.width / 6, style.height / 6
    middle = ((2 * column + 1) * wide, (2 * row + 1) * high)
    if group.count == 1:
        radius = _SINGLE_RADII[group.size] * min(wide, high) * source.uniform(0.92, 1.08)
        spread = 0.25 * (1 - _SINGLE_RADII[group.size])
        middle = (
            middle[0] + source.uniform(-spread, spread) * wide,
            middle[1] + source.uniform(-spread, spread) * high,
        )
        _place(draw, group.shape, middle, radius, source, colour)
        return
    # A cluster fills a square in its cell, stretched a little along the cell's longer edge.
    edge = min(wide, high)
    stretch = (min(wide / edge, 1.5), min(high / edge, 1.5))
    radius = _CLUSTER_RADII[group.count] * edge
    for x, y in _CLUSTERS[group.count]:
        where = (
            middle[0] + (x * stretch[0] + source.uniform(-0.05, 0.05)) * edge,
            middle[1] + (y * stretch[1] + source.uniform(-0.05, 0.05)) * edge,
        )
        _place(draw, group.shape, where, radius, source, colour)


def _draw_inside(draw: ImageDraw.ImageDraw, style: Style, pair: Pair, colours: tuple[Colour, Colour]) -> None:
    source = style.source
    outer = style.short * source.uniform(0.36, 0.44)
    middle = (
        source.uniform(outer, max(outer, style.width - outer)),
        source.uniform(outer, max(outer, style.height - outer)),
    )
    turn = source.uniform(-_TURN, _TURN)
    draw_shape(draw, pair.second.shape, _scaled(middle), outer * _OVERSAMPLING, turn, colours[1])
    inner = outer * inner_radius(pair.second.shape) * source.uniform(0.75, 0.9)
    x, y = _heart_of(pair.second.shape)
    middle = (middle[0] + x * outer, middle[1] + y * outer)
    _place(draw, pair.first.shape, middle, inner, source, colours[0])


def _heart_of(shape: str) -> Point:
    """Where inside a lopsided shape another one has room."""
    return {"crescent": (-0.68, 0.0), "half circle": (0.0, -0.42), "arrow": (0.3, 0.0)}.get(shape, (0.0, 0.0))


def _draw_apart(draw: ImageDraw.ImageDraw, style: Style, pair: Pair, colours: tuple[Colour, Colour]) -> None:
    source = style.source
    sideways = pair.relation in ("left of", "right of")
    long, short = (style.width, style.height) if sideways else (style.height, style.width)
    radius = min(long / 4.4, short / 2.2) * source.uniform(0.6, 0.9)
    gap = source.uniform(2.2 * radius, max(2.2 * radius, min(long - 2 * radius, 5 * radius)))
    start = source.uniform(radius, max(radius, long - radius - gap))
    drift = 0.3 * radius
    across = source.uniform(radius + drift, max(radius + drift, short - radius - drift))
    first_leads = pair.relation in ("left of", "above")
    for position, (thing, colour) in enumerate(zip((pair.first, pair.second), colours, strict=True)):
        along = start if (position == 0) == first_leads else start + gap
        aside = across + source.uniform(-drift, drift)
        where = (along, aside) if sideways else (aside, along)
        _place(draw, thing.shape, where, radius * source.uniform(0.85, 1.0), source, colour)


def _place(
    draw: ImageDraw.ImageDraw, shape: str, where: Point, radius: float, source: random.Random, colour: Colour
) -> None:
    turn = source.uniform(-_TURN, _TURN)
    if shape in ("star", "hexagon"):
        turn = source.uniform(0, 2 * math.pi)
    draw_shape(draw, shape, _scaled(where), radius * _OVERSAMPLING, turn, colour)


def _scaled(point: Point) -> Point:
    return (point[0] * _OVERSAMPLING, point[1] * _OVERSAMPLING)


def _enlarged(canvas: Image.Image) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """The canvas in twice its size: polygons are drawn without smooth edges otherwise."""
    size = (canvas.width * _OVERSAMPLING, canvas.height * _OVERSAMPLING)
    layer = canvas.resize(size, Image.Resampling.NEAREST)
    return layer, ImageDraw.Draw(layer)


def _reduced(layer: Image.Image, canvas: Image.Image) -> Image.Image:
    reduced = layer.reduce(_OVERSAMPLING)
    assert reduced.size == canvas.size
    return reduced
