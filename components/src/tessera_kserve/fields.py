"""Counts the fields of a large inference call, and takes its raw contents out, before it is parsed.

gRPC's parser keeps the interpreter until its end: 60 MB of empty tensors would take gigabytes and seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from tessera.errors import InvalidInput
from tessera.frontend.api.values import BRACKETS

MOST_INTEGERS: Final = 4_200_000
"""Of typed contents: as many values as a body of JSON may have."""

_Numbers = Mapping[int, object]
# By number, the fields that are messages or integers in a row, with theirs.
_INTEGERS: Final = "integers"
_PARAMETERS: Final[_Numbers] = {2: {}}
_CONTENTS: Final[_Numbers] = dict.fromkeys(range(1, 6), _INTEGERS)
_TENSOR: Final[_Numbers] = {3: _INTEGERS, 4: _PARAMETERS, 5: _CONTENTS}
_CALL: Final[_Numbers] = {4: _PARAMETERS, 5: _TENSOR, 6: {2: _PARAMETERS}}
_RAW_CONTENTS: Final = 7
_FIXED_BYTES: Final = {1: 8, 5: 4}
_VARINT, _BYTES = 0, 2
_PIECE_BYTES: Final = 1 << 18


class Fields:
    """Holds what is left of a ``ModelInferRequest`` without its raw contents, and those, uncopied.

    Raises ``InvalidInput`` for more fields, or integers, than a call has. Where it is no message, that holds
    for what stands before the first fault: a parser reads no further.
    """

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._fields = BRACKETS
        self._integers = MOST_INTEGERS
        view, at = memoryview(raw), 0
        kept: list[memoryview] = []
        self.contents: list[memoryview] = []
        try:
            for number, begin, start, end in self._walk(0, len(raw), _CALL):
                if number == _RAW_CONTENTS:
                    kept.append(view[at:begin])
                    self.contents.append(view[start:end])
                    at = end
        except IndexError:
            # The parser says so.
            pass
        self.rest = b"".join((*kept, view[at:]))

    def _walk(self, at: int, end: int, numbers: _Numbers) -> list[tuple[int, int, int, int]]:
        """Count the fields from one place to another.

        Returns of those that have a length: their numbers, where they begin, and where what is in them begins
        and ends. Raises ``IndexError`` for a fault.
        """
        found: list[tuple[int, int, int, int]] = []
        while at < end:
            self._fields -= 1
            if self._fields < 0:
                raise InvalidInput(
                    f"the message has more than {BRACKETS} fields; send fewer inputs at a time"
                )
            begin = at
            tag, at = self._varint(at)
            number, kind = tag >> 3, tag & 7
            if kind == _VARINT:
                _, at = self._varint(at)
            elif kind == _BYTES:
                size, at = self._varint(at)
                if size > end - at:
                    raise IndexError
                self._look_into(at, at + size, numbers.get(number))
                if numbers is _CALL:
                    found.append((number, begin, at, at + size))
                at += size
            elif kind in _FIXED_BYTES:
                at += _FIXED_BYTES[kind]
            else:
                # A group, which no version of the protocol has.
                raise InvalidInput("the message is no ModelInferRequest")
        return found

    def _look_into(self, at: int, end: int, numbers: object) -> None:
        if numbers is _INTEGERS:
            self._count_integers(at, end)
        elif isinstance(numbers, Mapping):
            self._walk(at, end, numbers)

    def _count_integers(self, at: int, end: int) -> None:
        """Count the last bytes of integers, 1 to 10 of which are in a row for each."""
        for start in range(at, end, _PIECE_BYTES):
            piece = np.frombuffer(self._raw, np.uint8, min(_PIECE_BYTES, end - start), start)
            self._integers -= int(np.count_nonzero(piece < 0x80))
            if self._integers < 0:
                raise InvalidInput(
                    f"the message has more than {MOST_INTEGERS} integers; send fewer at a time"
                )

    def _varint(self, at: int) -> tuple[int, int]:
        raw = self._raw
        byte = raw[at]
        if byte < 0x80:
            return byte, at + 1
        value = byte & 0x7F
        for place in range(1, 10):
            byte = raw[at + place]
            value |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                return value, at + place + 1
        raise IndexError
