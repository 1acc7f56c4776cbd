"""Draws pages of words, and the writing on charts and tables."""

from __future__ import annotations

import random

from PIL import Image, ImageDraw, ImageFont

from training.render.canvas import Canvases, Colour, Style, contrasting, ground, random_style
from training.render.fonts import FACES, font
from training.world.compositions import Page

SMALLEST_TYPE = 20
"""Pixels; half of it can still be read by whoever looks closely."""
_LINE = 1.45
"""From one line to the next, in type sizes."""
_CASES = ("lower", "lower", "title", "upper")


def draw_page(page: Page, source: random.Random, canvases: Canvases) -> Image.Image:
    """The words as they stand in the page's lines, on a canvas on which they all fit."""
    face, bold = random_face(source)
    case = source.choice(_CASES)
    lines = [cased(" ".join(line), case) for line in page.lines]
    title = cased(" ".join(page.title), source.choice(_CASES))
    rows = len(lines) + (1.7 if title else 0)
    grown = 0
    while True:
        style = random_style(source, canvases, least=grown)
        margin = 0.04 * style.short
        widest = max(font(face, 100).getlength(line) for line in lines)
        if title:
            widest = max(widest, 1.2 * font(bold, 100).getlength(title))
        fits = min((style.width - 2 * margin) / widest * 100, (style.height - 2 * margin) / rows / _LINE)
        if fits >= SMALLEST_TYPE:
            break
        grown = min(grown + 60, 700) or 256
    size = round(min(fits, max(SMALLEST_TYPE, min(72, fits) * source.uniform(0.55, 1.0))))
    paper, ink = paper_and_ink(source)
    canvas = ground(style, paper)
    draw = ImageDraw.Draw(canvas)
    step = size * _LINE
    top = margin + source.uniform(0, max(0.0, style.height - 2 * margin - rows * step))
    align = source.choice(("left", "left", "centre", "right"))
    if title:
        heading = font(bold, round(1.2 * size))
        write(draw, style, title, heading, top, margin, source.choice((align, "centre")), ink)
        top += 1.7 * step
    for line in lines:
        write(draw, style, line, font(face, size), top, margin, align, ink)
        top += step
    return canvas


def random_face(source: random.Random) -> tuple[str, str]:
    """A face for running text and one for headings."""
    face = source.choice(FACES)
    return face, source.choice((face, "DejaVuSans-Bold", "DejaVuSerif-Bold", "STIXGeneralBol", "cmb10"))


def paper_and_ink(source: random.Random) -> tuple[Colour, Colour]:
    """Dark on light more often than light on dark, coloured at times."""
    if source.random() < 0.5:
        ink = _tinted(source, 0, 60)
        return _tinted(source, 215, 255), ink
    ink = _tinted(source, 0, 255)
    return contrasting(source, ink, least=230.0), ink


def cased(text: str, case: str) -> str:
    if case == "upper":
        return text.upper()
    return text.title() if case == "title" else text


def write(
    draw: ImageDraw.ImageDraw,
    style: Style,
    text: str,
    face: ImageFont.FreeTypeFont,
    top: float,
    margin: float,
    align: str,
    ink: Colour,
) -> None:
    """One line of text with its top at ``top``, placed between the margins."""
    room = style.width - 2 * margin - face.getlength(text)
    left = margin + {"left": 0.0, "centre": room / 2, "right": room}[align]
    draw.text((left, top), text, font=face, fill=ink)


def _tinted(source: random.Random, low: int, high: int) -> Colour:
    base = source.randint(low, high)
    red, green, blue = (min(high, max(low, base + source.randint(-40, 40))) for _ in range(3))
    return (red, green, blue)
