"""The JSON of a request's body, bounded before it is parsed, with strings that are no text marked in it."""

from __future__ import annotations

import json
import re
from typing import Final

import numpy as np
import orjson

from tessera.errors import InvalidInput
from tessera.frontend.api.values import Json, NoText, clip, join

BRACKETS: Final = 200_000
"""Lists and objects of a body, at most: 24 for each of 8,192 inputs.

A conversation of three messages with a part each has ten, a content part with an image two. 200,000 empty
lists take 20 ms to parse; 20 million, in 60 MB, took 4 GB and stopped a frontend for 19 s.
"""
BRACKETS_AN_INPUT: Final = 24
_ELEMENTS: Final = 500_000
# As long as what numpy works on stays in the processor's cache.
_PIECE_BYTES: Final = 1 << 18
_QUOTE: Final = ord('"')
_HALF_A_PAIR: Final = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(raw: bytes, content_type: str = "", *, brackets: int = BRACKETS) -> Json:
    """Parse a request body; raises ``InvalidInput`` for anything that is not one JSON value in UTF-8.

    ``content_type`` is the header's value. It is no reason to refuse anything, and a likely one for what
    cannot be parsed. A string that is no text is refused by its path, or is a ``NoText`` in the body of a
    client that wants the other inputs' vectors.
    """
    if len(raw) > brackets and more_outside_strings(raw, b"[{", brackets):
        raise InvalidInput(
            f"the body has more than {brackets} lists and objects; send fewer inputs at a time"
        )
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        marked, first = _with_marks(raw)
        if first is not None:
            if isinstance(marked, dict) and marked.get("partial") is True:
                return marked
            raise first from None
        kind = content_type.partition(";")[0].strip().lower()
        named = kind and not kind.endswith(("/json", "+json"))
        said = f", and its Content-Type is {clip(kind)}, not application/json" if named else ""
        raise InvalidInput(f"the body is not valid JSON{said}: {error}") from None


def more_outside_strings(raw: bytes, marks: bytes, most: int) -> bool:
    """Whether more than ``most`` of the characters ``marks`` stand outside the strings of a JSON text.

    Where it is no JSON, that holds for what stands before the first fault: a parser reads no further.
    """
    return _more_anywhere(raw, marks, most) and _more_outside(raw, marks, most)


def _more_anywhere(raw: bytes, marks: bytes, most: int) -> bool:
    """Whether there are more even with those inside strings, which most bodies do not have: 0.6 ms a MB."""
    found = 0
    for at in range(0, len(raw), _PIECE_BYTES):
        found += sum(raw.count(mark, at, at + _PIECE_BYTES) for mark in marks)
        if found > most:
            return True
    return False


def _more_outside(raw: bytes, marks: bytes, most: int) -> bool:
    """Whether there are more without those inside strings: 6 ms a MB, whatever the strings are."""
    found, at, within = 0, 0, 0
    while at < len(raw) and found <= most:
        piece = raw[at : at + _PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            # It ends behind the first half of an escape.
            piece = raw[at : at + _PIECE_BYTES + 1]
        at += len(piece)
        plain = np.frombuffer(piece.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
        # Odd within a string, its first quote included.
        quotes = np.cumsum((plain == _QUOTE).view(np.uint8), dtype=np.uint8) + np.uint8(within)
        outside = quotes & 1 == 0
        found += sum(int(np.count_nonzero((plain == mark) & outside)) for mark in marks)
        within = int(quotes[-1]) & 1 if len(quotes) else within
    return found > most


def _with_marks(raw: bytes) -> tuple[Json, InvalidInput | None]:
    """Parse a body that the strict parser refused for a string that is no text.

    Gives the body with a ``NoText`` for each such string, and the error for the first; None for a body in
    which something else is wrong.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = raw.decode("utf-8", "surrogateescape")
    else:
        if not _HALF_A_PAIR.search(raw):
            return None, None
    # The parser of the standard library is slow, and holds everybody up.
    if more_outside_strings(raw, b",", _ELEMENTS):
        return None, None
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None, None
    faults: list[InvalidInput] = []
    return _marked(value, "", faults), faults[0] if faults else None


def _refuse(constant: str) -> Json:
    raise ValueError(constant)


def _marked(value: Json, path: str, faults: list[InvalidInput]) -> Json:
    match value:
        case str():
            at = _no_text_at(value)
            if at is None:
                return value
            mark = NoText(at)
            faults.append(InvalidInput(f"{path or 'the body'}: {mark}", param=path or None))
            return mark
        case list():
            return [_marked(item, f"{path}[{index}]", faults) for index, item in enumerate(value)]
        case dict():
            return {name: _marked(item, join(path, clip(name)), faults) for name, item in value.items()}
        case _:
            return value


def _no_text_at(text: str) -> int | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None
