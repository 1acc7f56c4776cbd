"""Counts and parses a large body in pieces: a parser keeps the interpreter until its end."""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, Final, TypeAlias, TypeGuard

import numpy as np
import orjson

# Of a string, as far as it has no half of a surrogate pair; an escape that is cut off is left.
_ESCAPES: Final = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+",
    re.DOTALL,
)
_HALF_A_PAIR: Final = re.compile(rb"\\u[dD][89a-fA-F]")
# The longest escape, of a surrogate pair.
_ESCAPE_BYTES: Final = 12
# As long as what numpy works on stays in the processor's cache.
_LOOK_BYTES: Final = 1 << 18
# 100,000 numbers of five digits: 8 ms.
_PIECE_BYTES: Final = 1 << 19
# Of JSON that is parsed by the standard library.
_ELEMENTS: Final = 500_000
# Likewise: bytes that are no text take 10 ms a MB to decode. Strings of 64 KB are not among them.
_MOST_MARKED_BYTES: Final = 4 << 20
_LONG_STRING_BYTES: Final = 1 << 16
# 8,192 lists with fewer are no more values than may be outside lists of numbers.
_LONG_LIST: Final = 64
_WHOLE: Final = b"-0123456789, \t\r\n"
_FRACTION: Final = b".eE+"
_DEPTH: Final = 64
_QUOTE: Final = ord('"')
_COMMA: Final = ord(",")
_OPENING, _END = ord("["), ord("]")
# Outside strings, what no list of plain values has between its brackets.
_SPECIAL: Final = np.isin(np.arange(256), list(b"[]{}:"))
_CLOSING: Final = {ord("["): b"]", ord("{"): b"}"}

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
Taken = MutableMapping[str, object]
"""What was taken out of a body, by the string that stands in its place."""

Numbers: TypeAlias = "array[Any]"
"""A long list of numbers: 64-bit integers, ``q``, or doubles, ``d``."""

_Holder = list[object] | dict[str, object]


class Parser:
    """Parses JSON, also where strings in it are no text: ``fault`` is the first one's error."""

    def __init__(self) -> None:
        self.fault: orjson.JSONDecodeError | None = None

    def parse(self, raw: bytes) -> object:
        """Raise ``JSONDecodeError``, whose positions are those in a piece."""
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            # The parser of the standard library is slow, and holds everybody up.
            if len(raw) > _MOST_MARKED_BYTES or more_outside_strings(raw, b",", _ELEMENTS):
                raise
            if not _may_hold_no_text(raw):
                raise
            try:
                value: object = json.loads(raw.decode("utf-8", "surrogateescape"), parse_constant=_refuse)
            except (ValueError, RecursionError):
                raise error from None
            self.fault = self.fault or error
            return value


def _refuse(constant: str) -> object:
    raise ValueError(constant)


def _may_hold_no_text(raw: bytes) -> bool:
    """Return whether JSON may have a string with bytes that are not UTF-8, or with half a surrogate pair."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        return True
    return _HALF_A_PAIR.search(raw) is not None


def without_long_strings(raw: bytes, taken: Taken, parser: Parser) -> bytes:
    """Return JSON with a short string in place of each of 64 KB or more."""
    strings = ((begin, end, _string(raw, begin, end, parser)) for begin, end in _long_strings(raw))
    return _without(raw, taken, strings)


def _without(raw: bytes, taken: Taken, parts: Iterable[tuple[int, int, object]]) -> bytes:
    """Take parts out of JSON: the values that stand between two places each."""
    kept: list[bytes] = []
    # What stands in their place no client can write.
    mark, at = os.urandom(16).hex(), 0
    for begin, end, value in parts:
        name = f"{mark}{len(taken)}"
        taken[name] = value
        kept += (raw[at:begin], b'"%s"' % name.encode())
        at = end
    return b"".join((*kept, raw[at:])) if kept else raw


def _long_strings(raw: bytes) -> Iterator[tuple[int, int]]:
    """Yield where each begins, and where it has ended."""
    at, begin = 0, -1
    while at < len(raw):
        plain = _plain(raw, at, _LOOK_BYTES)
        quotes = np.flatnonzero(plain == _QUOTE) + at
        at += len(plain)
        if begin >= 0 and len(quotes):
            end, quotes = int(quotes[0]) + 1, quotes[1:]
            if end - begin > _LONG_STRING_BYTES:
                yield begin, end
            begin = -1
        begins, ends = quotes[::2], quotes[1::2]
        for place in np.flatnonzero(ends - begins[: len(ends)] >= _LONG_STRING_BYTES):
            yield int(begins[place]), int(ends[place]) + 1
        if len(begins) > len(ends):
            begin = int(begins[-1])


def _plain(raw: bytes, at: int, size: int) -> Bytes:
    """Return bytes without escaped quotes, so that each quote begins or ends a string."""
    piece = raw[at : at + size]
    if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
        # It ends behind the first half of an escape.
        piece = raw[at : at + size + 1]
    return np.frombuffer(piece.replace(rb"\\", b"__").replace(rb"\"", b"__"), np.uint8)


def _outside(plain: Bytes, within: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.bool]], int]:
    """Return which bytes are outside strings, whose first quotes are within; and what is ``within`` behind.

    That is 1 where a string goes on, else 0.
    """
    counts = np.cumsum((plain == _QUOTE).view(np.uint8), dtype=np.uint8) + np.uint8(within)
    return counts & 1 == 0, int(counts[-1]) & 1 if len(counts) else within


def more_outside_strings(raw: bytes, marks: bytes, most: int) -> bool:
    """Whether more than ``most`` of the characters ``marks`` stand outside the strings of a JSON text.

    Where it is no JSON, that holds for what stands before the first fault: a parser reads no further.
    """
    return _more_anywhere(raw, marks, most) and _more_outside(raw, marks, most)


def _more_anywhere(raw: bytes, marks: bytes, most: int) -> bool:
    """Whether there are more even with those inside strings, which most bodies do not have: 0.8 ms a MB."""
    found = 0
    for at in range(0, len(raw), _LOOK_BYTES):
        found += sum(raw.count(mark, at, at + _LOOK_BYTES) for mark in marks)
        if found > most:
            return True
    return False


def _more_outside(raw: bytes, marks: bytes, most: int) -> bool:
    """Whether there are more without those inside strings: 6 ms a MB, whatever the strings are."""
    found, at, within = 0, 0, 0
    while at < len(raw) and found <= most:
        plain = _plain(raw, at, _LOOK_BYTES)
        at += len(plain)
        outside, within = _outside(plain, within)
        found += sum(int(np.count_nonzero((plain == mark) & outside)) for mark in marks)
    return found > most


def _string(raw: bytes, begin: int, end: int, parser: Parser) -> object:
    """Parse the string between two places, where its quotes are."""
    if end - begin <= _PIECE_BYTES:
        return parser.parse(raw[begin:end])
    parts: list[str] = []
    at, end = begin + 1, end - 1
    while at < end:
        stop = _stop(raw, at, end)
        parts.append(str(parser.parse(b'"%b"' % raw[at:stop])))
        at = stop
    return "".join(parts)


def _stop(raw: bytes, at: int, end: int) -> int:
    """Return where the next piece of a string may end: between two characters."""
    stop = at + _PIECE_BYTES
    if stop >= end:
        return end
    if raw.find(b"\\", stop - _ESCAPE_BYTES, stop) >= 0:
        match = _ESCAPES.match(raw, at, stop)
        # Behind half of a surrogate pair, where that is first.
        stop = match.end() if match is not None and match.end() > at else at + _ESCAPE_BYTES // 2
    while raw[stop] & 0xC0 == 0x80 and stop > at + 1:
        stop -= 1
    return min(stop, end)


def without_numbers(raw: bytes, taken: Taken) -> bytes:
    """Return JSON with a string in place of each list of 64 numbers or more, which becomes an array.

    It is of 64-bit integers, or of doubles where a number has a fraction or an exponent. Millions of objects
    would be freed in one piece: 4.2 million integers take 60 ms. Raises ``JSONDecodeError``, whose positions
    are those in a piece.
    """
    lists = ((begin, end, _numbers(raw, begin + 1, end - 1)) for begin, end in _plain_lists(raw))
    return _without(raw, taken, (entry for entry in lists if entry[2] is not None))


def _plain_lists(raw: bytes) -> Iterator[tuple[int, int]]:
    """Yield where each list begins and has ended of values that are neither strings, lists nor objects.

    Token ids and pixels are such lists.
    """
    at, begin, within = 0, -1, 0
    while at < len(raw):
        plain = _plain(raw, at, _LOOK_BYTES)
        outside, within = _outside(plain, within)
        places = np.flatnonzero(_SPECIAL[plain] & outside | (plain == _QUOTE))
        kinds, places = plain[places], places + at
        if len(kinds):
            if begin >= 0 and kinds[0] == _END and places[0] - begin > 1:
                yield begin, int(places[0]) + 1
            begin = int(places[-1]) if kinds[-1] == _OPENING else -1
        for place in np.flatnonzero((kinds[:-1] == _OPENING) & (kinds[1:] == _END)):
            if places[place + 1] - places[place] > 1:
                yield int(places[place]), int(places[place + 1]) + 1
        at += len(plain)


def _numbers(raw: bytes, at: int, end: int) -> Numbers | None:
    """Parse the values between two places; None where they are few, or not all numbers of 64 bits."""
    if raw.count(b",", at, end) < _LONG_LIST - 1:
        return None
    others = b"".join(
        [raw[begin:stop].translate(None, _WHOLE) for begin, stop in _between_commas(raw, at, end)]
    )
    if others.translate(None, _FRACTION):
        return None
    numbers: Numbers = array("d" if others else "q")
    try:
        for begin, stop in _between_commas(raw, at, end):
            values = orjson.loads(b"[%b]" % raw[begin:stop])
            if not values:
                raise orjson.JSONDecodeError("unexpected character", "", 0)
            numbers.extend(values)
    except (OverflowError, TypeError):
        # An integer below those of 64 bits is parsed as a float.
        return None
    return numbers


def _between_commas(raw: bytes, at: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield where pieces of a list begin and end, each at a comma."""
    while (comma := raw.find(b",", at + _PIECE_BYTES, end)) >= 0:
        yield at, comma
        at = comma + 1
    yield at, end


def in_pieces(raw: bytes, parser: Parser) -> object:
    """Parse JSON without long strings in pieces, each from one comma to another.

    What is open at a comma is closed behind the piece, and opened again before the next one. Raises
    ``JSONDecodeError``, whose positions are those in a piece.
    """
    first, last = os.urandom(16).hex(), os.urandom(16).hex()
    root = _Root(first, last)
    kinds, at = b"", 0
    while True:
        cut, brackets = _next_cut(raw, at)
        after = _opened(kinds, brackets) if cut < len(raw) else b""
        root.add(parser.parse(b"".join((root.before(kinds), raw[at:cut], root.behind(after)))), after)
        if cut == len(raw):
            return root.value
        kinds, at = after, cut + 1


def _next_cut(raw: bytes, at: int) -> tuple[int, bytes]:
    """Return the place of the last comma outside strings of a piece, and the brackets before it."""
    size = _PIECE_BYTES
    while at + size < len(raw):
        plain = _plain(raw, at, size)
        outside, _ = _outside(plain, 0)
        commas = np.flatnonzero((plain == _COMMA) & outside)
        if len(commas):
            before, outside = plain[: commas[-1]], outside[: commas[-1]]
            folded = before | 0x20
            brackets = before[outside & ((folded == ord("{")) | (folded == ord("}")))]
            return at + int(commas[-1]), brackets.tobytes()
        size *= 2
    return len(raw), b""


def _opened(kinds: bytes, brackets: bytes) -> bytes:
    """Return what is open behind brackets; raises ``JSONDecodeError`` for nothing, and for too much."""
    kept = bytearray(kinds)
    for bracket in brackets:
        if bracket in _CLOSING:
            kept.append(bracket)
        elif not kept or _CLOSING[kept.pop()][0] != bracket:
            raise orjson.JSONDecodeError("unexpected character", "", 0)
    if not 0 < len(kept) <= _DEPTH:
        raise orjson.JSONDecodeError("unexpected character", "", 0)
    return bytes(kept)


class _Root:
    """Holds the value of which pieces are parsed; ``first`` and ``last`` are strings that no client has."""

    def __init__(self, first: str, last: str) -> None:
        self._first = first
        self._last = last
        self._open: list[_Holder] = []
        self.value: object = None

    def before(self, kinds: bytes) -> bytes:
        """Return what opens the holders of these kinds."""
        deeper = b'{"%s":' % self._first.encode()
        return b"".join(b"[" if kind == ord("[") else deeper for kind in kinds[:-1]) + kinds[-1:]

    def behind(self, kinds: bytes) -> bytes:
        """Return what marks the innermost holder, and closes all."""
        if not kinds:
            return b""
        mark = b',"%s"' % self._last.encode() + (b":0" if kinds[-1] == ord("{") else b"")
        return mark + b"".join(_CLOSING[kind] for kind in reversed(kinds))

    def add(self, piece: object, kinds: bytes) -> None:
        """Add what was parsed; holders of these kinds are open behind it."""
        path = self._path(piece, len(kinds)) if kinds else []
        if not self._open:
            self.value, self._open = piece, path
            return
        continued: list[object] = []
        node: object = piece
        for depth, holder in enumerate(self._open):
            continued.append(node)
            deeper = depth + 1 < len(self._open)
            if isinstance(holder, list) and isinstance(node, list):
                inner = node[0] if deeper else None
                holder += node[1:] if deeper else node
            elif isinstance(holder, dict) and isinstance(node, dict):
                inner = node.pop(self._first) if deeper else None
                holder.update(node)
            else:
                raise orjson.JSONDecodeError("unexpected character", "", 0)
            node = inner
        same = [
            holder for holder, node, there in zip(self._open, continued, path, strict=False) if node is there
        ]
        self._open = [*same, *path[len(same) :]]

    def _path(self, node: object, depth: int) -> list[_Holder]:
        """Return the holders down to that with the mark, which is removed."""
        found = self._marked(node, depth)
        if found is None:
            raise orjson.JSONDecodeError("unexpected character", "", 0)
        return found

    def _marked(self, node: object, depth: int) -> list[_Holder] | None:
        if not _is_holder(node):
            return None
        if depth == 1:
            if isinstance(node, list):
                return [node] if node and node[-1] == self._last and node.pop() else None
            return [node] if node.pop(self._last, None) is not None else None
        # The last one, but of keys that come twice the first has the place.
        inner = node[-1:] if isinstance(node, list) else reversed(node.values())
        for value in inner:
            if (found := self._marked(value, depth - 1)) is not None:
                return [node, *found]
        return None


def _is_holder(value: object) -> TypeGuard[_Holder]:
    return isinstance(value, list | dict)


def filled(value: object, taken: Taken) -> object:
    """Put what was taken out into its place; raises ``JSONDecodeError`` for a list in place of a key."""
    root = [value]
    waiting: list[_Holder] = [root]
    while waiting:
        holder = waiting.pop()
        if isinstance(holder, dict):
            for key in [key for key in holder if key in taken]:
                name, own = taken[key], holder.pop(key)
                if not isinstance(name, str):
                    raise orjson.JSONDecodeError("key must be a string", "", 0)
                holder[name] = own
        places = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for place, value in places:
            if type(value) is str:
                if value in taken:
                    holder[place] = taken[value]  # type: ignore[index]
            elif _is_holder(value):
                waiting.append(value)
    return root[0]
