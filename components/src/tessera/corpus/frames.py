"""What a run, its engine processes and their workers say to each other: MessagePack over socket pairs."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Final, Self

import msgspec

from tessera import wire
from tessera.corpus.embedder import Served, Usage, VectorSettings
from tessera.corpus.item import Item

_LENGTH: Final = struct.Struct("<Q")
# Vectors of 64 texts are half a megabyte: a frame is to come in few pieces, each of which wakes the loop.
_BUFFER_BYTES: Final = 4 << 20


class Load(msgspec.Struct, frozen=True, tag=True):
    """The first message to a worker: its flags, and what its parent found of the model."""

    flags: list[str]
    source: str


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message to an engine process; ``loads`` as ``Engine.start`` takes them."""

    loads: list[Load]
    vectors: VectorSettings


class Embed(msgspec.Struct, frozen=True, tag=True):
    number: int
    items: list[Item]


class Ask(msgspec.Struct, frozen=True, tag=True):
    number: int
    request: wire.EmbedRequest


class Tell(msgspec.Struct, frozen=True, tag=True):
    """Asks for ``Used``."""

    number: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """A worker can be asked."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """An engine process can be asked."""

    served: Served


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Why there is no engine, or none any more: a ``TesseraError``'s code and message."""

    code: str
    message: str


class Made(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``Embed``: float32 ``[sum(counts), width]``, rows and tokens of each item.

    ``reasons`` says why an item, by its place, has none.
    """

    number: int
    rows: bytes
    counts: list[int]
    tokens: list[int]
    reasons: dict[int, str]


class Replied(msgspec.Struct, frozen=True, tag=True):
    number: int
    reply: wire.EmbedReply | wire.Failure


class Used(msgspec.Struct, frozen=True, tag=True):
    number: int
    usage: Usage


First = Load | Start
Begun = Loaded | Ready
Question = Embed | Ask | Tell
Answer = Made | Replied | Used
Frame = First | Begun | Question | Answer | Refused

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


class Channel:
    """One end, owned by one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def of(cls, end: socket.socket) -> Self:
        for kind in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, kind, _BUFFER_BYTES)
        return cls(*await asyncio.open_unix_connection(sock=end, limit=_BUFFER_BYTES))

    async def send(self, frame: Frame) -> None:
        """Raises ``ConnectionError`` when the other end has gone."""
        body = _encoder.encode(frame)
        self._writer.writelines((_LENGTH.pack(len(body)), body))
        await self._writer.drain()

    async def receive(self) -> Frame | None:
        """The next one; None when the other end has gone."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return _decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        self._writer.close()
