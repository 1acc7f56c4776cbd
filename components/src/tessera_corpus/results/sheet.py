"""The contact sheet: the query and its results as one PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from PIL import Image, ImageDraw, ImageFont, ImageOps

from tessera.errors import OutputFailed
from tessera_corpus.results.entry import Entry, Query

_COLUMNS: Final = 4
_CELL, _PICTURE, _GAP = (240, 226), (240, 180), 16
_HEADER: Final = 76
_LINE: Final = 18
_GROUND, _PLATE, _INK, _QUIET, _ACCENT = "#f5f4f0", "#ffffff", "#1d2327", "#56616a", "#0b6e6e"
_EDGE: Final = "#d5d8d6"

_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def write_sheet(path: Path, query: Query, entries: Sequence[Entry], said: str) -> None:
    """``said`` stands below the query; raises ``OutputFailed`` where ``path`` cannot be written."""
    columns = min(_COLUMNS, max(2, len(entries)))
    rows = -(-len(entries) // columns)
    width = _GAP + columns * (_CELL[0] + _GAP)
    sheet = Image.new("RGB", (width, _HEADER + rows * (_CELL[1] + _GAP) + _GAP // 2), _GROUND)
    draw = ImageDraw.Draw(sheet)
    left = _GAP
    if query.small is not None:
        small = ImageOps.contain(query.small, (_HEADER, _HEADER - 20))
        sheet.paste(small, (left, 10))
        left += small.width + 12
    room = width - left - _GAP
    draw.text((left, 14), _fit(draw, query.text or f"like {query.picture}", _font(22), room), _INK, _font(22))
    draw.text((left, 46), _fit(draw, said, _font(13), room), _QUIET, _font(13))
    for place, entry in enumerate(entries):
        row, column = divmod(place, columns)
        corner = _GAP + column * (_CELL[0] + _GAP), _HEADER + row * (_CELL[1] + _GAP)
        _cell(sheet, draw, corner, place, entry)
    try:
        sheet.save(path, "PNG", optimize=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OutputFailed(f"{path}: cannot be written: {reason}") from error


def _cell(
    sheet: Image.Image, draw: ImageDraw.ImageDraw, corner: tuple[int, int], place: int, entry: Entry
) -> None:
    x, y = corner
    outline = _ACCENT if place == 0 else _EDGE
    draw.rounded_rectangle((x, y, x + _CELL[0], y + _CELL[1]), 8, _PLATE, outline, 2 if place == 0 else 1)
    inner = _PICTURE[0] - 12, _PICTURE[1] - 12
    if entry.picture is not None:
        small = ImageOps.contain(entry.picture, inner)
        sheet.paste(small, (x + (_CELL[0] - small.width) // 2, y + 6 + (inner[1] - small.height) // 2))
    else:
        _lines(draw, (x + 12, y + 10), inner, entry)
    line = y + _PICTURE[1]
    draw.text((x + 10, line), f"{place + 1}.", _INK, _font(15))
    draw.text((x + _CELL[0] - 10, line), f"{entry.score:.3f}", _INK, _font(15), anchor="ra")
    name = entry.name + (f" (+{len(entry.others)})" if entry.others else "")
    draw.text((x + 10, line + 21), _fit(draw, name, _font(13), _CELL[0] - 20), _QUIET, _font(13))


def _lines(draw: ImageDraw.ImageDraw, corner: tuple[int, int], room: tuple[int, int], entry: Entry) -> None:
    """The beginning of a text, or why there is nothing."""
    (x, y), font = corner, _font(13)
    words, ink = (entry.text or entry.note or "nothing to show").split(), _INK if entry.text else _QUIET
    most = room[1] // _LINE
    for number in range(most):
        line = words.pop(0) if words else ""
        while words and draw.textlength(f"{line} {words[0]}", font) <= room[0] - 12:
            line += f" {words.pop(0)}"
        if words and number == most - 1:
            line += " …"
        draw.text((x, y + number * _LINE), _fit(draw, line, font, room[0] - 12), ink, font)


def _font(size: int) -> _Font:
    try:
        # Knows more scripts than the font that Pillow brings along.
        return ImageFont.truetype("DejaVuSans.ttf", size)
    except OSError:
        return ImageFont.load_default(size)


def _fit(draw: ImageDraw.ImageDraw, text: str, font: _Font, width: int) -> str:
    """``text`` on one line of at most ``width`` pixels, its end left out if it must be."""
    if draw.textlength(text, font) <= width:
        return text
    while text and draw.textlength(text + "…", font) > width:
        text = text[:-1]
    return text + "…"
