"""Draws bar, line and pie charts, and tables."""

from __future__ import annotations

import math
import random

from PIL import Image, ImageDraw, ImageFont

from training.render.canvas import Canvases, Colour, Style, contrasting, ground, random_style, varied
from training.render.fonts import font
from training.render.pages import SMALLEST_TYPE, cased, paper_and_ink, random_face, write
from training.world.compositions import Chart, Table
from training.world.words import COLOURS

_LEAST = 380
"""Edge of the square of least area that holds a chart or a table."""


def draw_chart(chart: Chart, source: random.Random, canvases: Canvases) -> Image.Image:
    """The highest and the lowest label stand out clearly; the values between them are random."""
    face, bold = random_face(source)
    colour = (0, 0, 0) if chart.colour == "mixed" else varied(chart.colour, source)
    while True:
        style = random_style(source, canvases, least=_LEAST, widest=2.2)
        size = source.randint(SMALLEST_TYPE, 26)
        letters = font(face, size)
        room = style.width * (0.42 if chart.kind == "pie" else 0.94 / len(chart.labels))
        if max(letters.getlength(label) for label in chart.labels) < room - 4:
            break
    paper = contrasting(source, colour, (0, 0, 0), least=150.0)
    canvas = ground(style, paper)
    draw = ImageDraw.Draw(canvas)
    top = _headline(draw, style, " ".join(chart.title), bold, size)
    values = _values(chart, source)
    if chart.kind == "pie":
        _draw_pie(draw, style, chart, values, letters, top)
    else:
        _draw_axes(draw, style, chart, values, letters, top, colour)
    return canvas


def draw_table(table: Table, source: random.Random, canvases: Canvases) -> Image.Image:
    face, bold = random_face(source)
    cells = [("", *table.columns), *((name, *map(str, numbers)) for name, numbers in table.rows)]
    while True:
        style = random_style(source, canvases, least=_LEAST - 60, widest=2.2)
        size = source.randint(SMALLEST_TYPE, 30)
        letters = font(face, size)
        widths = [max(letters.getlength(row[column]) for row in cells) for column in range(len(cells[0]))]
        spare = style.width * 0.92 - sum(widths)
        height = style.height - 2.6 * size
        if spare > 12 * len(widths) and height > 1.4 * size * len(cells):
            break
    paper, ink = paper_and_ink(source)
    canvas = ground(style, paper)
    draw = ImageDraw.Draw(canvas)
    top = _headline(draw, style, " ".join(table.title), bold, size, ink)
    step = min((style.height - top - 4) / len(cells), source.uniform(1.4, 2.2) * size)
    gap = min(spare / len(widths), source.uniform(1.0, 3.0) * size)
    ruled = source.random() < 0.6
    for number, row in enumerate(cells):
        left = style.width * 0.04
        for text, width in zip(row, widths, strict=True):
            draw.text((left, top), text, font=letters, fill=ink)
            left += width + gap
        top += step
        if ruled or number == 0:
            line = top - 0.15 * size
            draw.line((style.width * 0.03, line, min(left, style.width * 0.97), line), fill=ink)
    return canvas


def _headline(
    draw: ImageDraw.ImageDraw, style: Style, title: str, bold: str, size: int, ink: Colour = (0, 0, 0)
) -> float:
    """Write the title and return where the rest may begin."""
    source = style.source
    title = cased(title, source.choice(("lower", "title", "upper")))
    face = font(bold, size)
    while face.getlength(title) > style.width * 0.96 and size > 12:
        size -= 1
        face = font(bold, size)
    write(draw, style, title, face, 0.3 * size, 0.02 * style.width, source.choice(("left", "centre")), ink)
    return 2.0 * size


def _values(chart: Chart, source: random.Random) -> list[float]:
    """Shares of the full height, or weights of the slices."""
    return [
        1.0
        if label == chart.highest
        else source.uniform(0.12, 0.22)
        if label == chart.lowest
        else source.uniform(0.38, 0.75)
        for label in chart.labels
    ]


def _draw_axes(
    draw: ImageDraw.ImageDraw,
    style: Style,
    chart: Chart,
    values: list[float],
    letters: ImageFont.FreeTypeFont,
    top: float,
    colour: Colour,
) -> None:
    black = (0, 0, 0)
    left, right = 0.03 * style.width, 0.97 * style.width
    base = style.height - 1.6 * letters.size
    slot = (right - left) / len(values)
    points = []
    for number, (label, value) in enumerate(zip(chart.labels, values, strict=True)):
        middle = left + (number + 0.5) * slot
        height = base - value * (base - top)
        points.append((middle, height))
        if chart.kind == "bar":
            draw.rectangle((middle - 0.32 * slot, height, middle + 0.32 * slot, base), fill=colour)
        draw.text((middle - letters.getlength(label) / 2, base + 2), label, font=letters, fill=black)
    if chart.kind == "line":
        draw.line(points, fill=colour, width=5, joint="curve")
        for x, y in points:
            draw.ellipse((x - 6, y - 6, x + 6, y + 6), fill=colour)
    draw.line((left, top, left, base, right, base), fill=black, width=2)


def _draw_pie(
    draw: ImageDraw.ImageDraw,
    style: Style,
    chart: Chart,
    values: list[float],
    letters: ImageFont.FreeTypeFont,
    top: float,
) -> None:
    """Slices on the left, a legend in the same order on the right."""
    source = style.source
    names = source.sample([name for name in COLOURS if name not in ("white", "black", "grey")], len(values))
    radius = min(style.width * 0.24, (style.height - top) * 0.47)
    x, y = style.width * 0.27, (top + style.height) / 2
    angle = source.uniform(0, 360)
    step = min(1.7 * letters.size, (style.height - top) / len(values))
    line = y - step * len(values) / 2
    for label, value, name in zip(chart.labels, values, names, strict=True):
        colour = varied(name, source)
        sweep = 360 * value / math.fsum(values)
        draw.pieslice((x - radius, y - radius, x + radius, y + radius), angle, angle + sweep, fill=colour)
        angle += sweep
        edge = 0.7 * letters.size
        draw.rectangle(
            (style.width * 0.54, line + 3, style.width * 0.54 + edge, line + 3 + edge), fill=colour
        )
        draw.text((style.width * 0.54 + 1.3 * edge, line), label, font=letters, fill=(0, 0, 0))
        line += step
