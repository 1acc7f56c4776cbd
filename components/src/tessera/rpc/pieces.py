"""Long payloads of replies, in pieces: no message is long, and short replies pass between them."""

from __future__ import annotations

from typing import Final

import numpy as np

from tessera import wire
from tessera.errors import ProtocolError

PIECE_BYTES: Final = 2 << 20
"""The longest payload of replies that travels whole, and what a piece of a longer one holds."""

_MOST_BYTES: Final = 256 << 20


class Cut:
    """A payload on its way out."""

    def __init__(self, number: int, payload: bytes) -> None:
        self._number = number
        self._payload = memoryview(payload)
        self._sent = 0

    @property
    def left(self) -> int:
        """Bytes that have not been sent."""
        return len(self._payload) - self._sent

    def next(self) -> bytes:
        """The payload of its next piece."""
        data = self._payload[self._sent : self._sent + PIECE_BYTES]
        self._sent += len(data)
        return wire.encode(wire.Piece(payload=self._number, nbytes=len(self._payload), data=data))


class Joined:
    """The payloads of one stream that come in pieces, at most ``most`` at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        # By number, a payload's bytes and those of its pieces that have come.
        self._begun: dict[int, tuple[memoryview, int]] = {}

    def add(self, piece: wire.Piece) -> wire.Replies | wire.Failure | None:
        """The payload that this was the last piece of; raises ``ProtocolError`` for one that fits in none."""
        if piece.payload not in self._begun:
            if len(self._begun) >= self._most:
                raise ProtocolError(f"pieces of more than {self._most} payloads at a time")
            if not 0 < piece.nbytes <= _MOST_BYTES:
                raise ProtocolError(f"a payload of {piece.nbytes} bytes, not 1 to {_MOST_BYTES}")
            # Its pages are taken as they are written to.
            self._begun[piece.payload] = np.empty(piece.nbytes, np.uint8).data, 0
        payload, before = self._begun[piece.payload]
        nbytes, received = len(payload), before + len(piece.data)
        if not len(piece.data) or piece.nbytes != nbytes or received > nbytes:
            raise ProtocolError(
                f"a piece that brings {received} bytes of {piece.nbytes} to a payload of {nbytes}"
            )
        payload[before:received] = piece.data
        if received < nbytes:
            self._begun[piece.payload] = payload, received
            return None
        del self._begun[piece.payload]
        joined = wire.decode_replies(payload)
        if isinstance(joined, wire.Piece):
            raise ProtocolError("a piece within a piece")
        return joined
