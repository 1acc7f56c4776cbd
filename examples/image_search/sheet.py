"""The contact sheet: the query and its results as one PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from image_search.errors import SearchError
from image_search.folder import shown
from image_search.index import Hit
from image_search.query import Query
from image_search.thumbnail import thumbnail

_COLUMNS = 4
_CELL, _PICTURE, _GAP = (240, 226), (240, 180), 16
_HEADER = 76
_GROUND, _PLATE, _INK, _QUIET, _ACCENT = "#f5f4f0", "#ffffff", "#1d2327", "#56616a", "#0b6e6e"

_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def write_sheet(path: Path, query: Query, hits: Sequence[Hit], model: str) -> None:
    """Raises ``SearchError`` when ``path`` cannot be written."""
    columns = min(_COLUMNS, max(2, len(hits)))
    rows = -(-len(hits) // columns)
    width = _GAP + columns * (_CELL[0] + _GAP)
    sheet = Image.new("RGB", (width, _HEADER + rows * (_CELL[1] + _GAP) + _GAP // 2), _GROUND)
    draw = ImageDraw.Draw(sheet)
    left = _GAP
    if query.image and (small := thumbnail(query.image, _HEADER, _HEADER - 20)):
        sheet.paste(small, (left, 10))
        left += small.width + 12
    text = query.text or f"like {shown(Path(query.image.name)) if query.image else ''}"
    draw.text((left, 14), _fit(draw, text, _font(22), width - left - _GAP), _INK, _font(22))
    draw.text((left, 46), f"{len(hits)} results of {model}, by cosine", _QUIET, _font(13))
    for place, hit in enumerate(hits):
        row, column = divmod(place, columns)
        corner = _GAP + column * (_CELL[0] + _GAP), _HEADER + row * (_CELL[1] + _GAP)
        _cell(sheet, draw, corner, place, hit)
    try:
        sheet.save(path, "PNG", optimize=True)
    except (OSError, ValueError) as error:
        raise SearchError(f"{path}: cannot be written: {error}") from error


def _cell(
    sheet: Image.Image, draw: ImageDraw.ImageDraw, corner: tuple[int, int], place: int, hit: Hit
) -> None:
    x, y = corner
    outline = _ACCENT if place == 0 else "#d5d8d6"
    draw.rounded_rectangle((x, y, x + _CELL[0], y + _CELL[1]), 8, _PLATE, outline, 2 if place == 0 else 1)
    inner = _PICTURE[0] - 12, _PICTURE[1] - 12
    small = thumbnail(hit.paths[0], *inner)
    if small:
        sheet.paste(small, (x + (_CELL[0] - small.width) // 2, y + 6 + (inner[1] - small.height) // 2))
    else:
        draw.text((x + 12, y + 80), "the file cannot be read", _QUIET, _font(13))
    line = y + _PICTURE[1]
    draw.text((x + 10, line), f"{place + 1}.", _INK, _font(15))
    draw.text((x + _CELL[0] - 10, line), f"{hit.score:.3f}", _INK, _font(15), anchor="ra")
    name = shown(Path(hit.paths[0].name))
    if len(hit.paths) > 1:
        name += f" (+{len(hit.paths) - 1})"
    draw.text((x + 10, line + 21), _fit(draw, name, _font(13), _CELL[0] - 20), _QUIET, _font(13))


def _font(size: int) -> _Font:
    try:
        # Knows more scripts than the font that Pillow brings along.
        return ImageFont.truetype("DejaVuSans.ttf", size)
    except OSError:
        return ImageFont.load_default(size)


def _fit(draw: ImageDraw.ImageDraw, text: str, font: _Font, width: int) -> str:
    """``text`` on one line of at most ``width`` pixels, its end left out if it must be."""
    text = " ".join(text.split())
    if draw.textlength(text, font) <= width:
        return text
    while text and draw.textlength(text + "…", font) > width:
        text = text[:-1]
    return text + "…"
