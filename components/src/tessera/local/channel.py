"""Sends messages between a process and its child: MessagePack behind its length, over a socket pair."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Final, Self

import msgspec

from tessera.local.messages import Message

_LENGTH: Final = struct.Struct("<Q")
# Vectors of 64 texts are half a megabyte: a message is to come in few pieces, each of which wakes the loop.
_BUFFER_BYTES: Final = 4 << 20

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


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

    async def send(self, message: Message) -> None:
        """Raises ``ConnectionError`` when the other end has gone."""
        self.post(message)
        await self._writer.drain()

    def post(self, message: Message) -> None:
        """Send without waiting for room, something short."""
        if not self._writer.is_closing():
            body = _encoder.encode(message)
            self._writer.writelines((_LENGTH.pack(len(body)), body))

    async def receive(self) -> Message | None:
        """Return the next message; None when the other end has gone."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return _decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        """End the connection, also where a process that was forked from this one still has its descriptor."""
        if not self._writer.is_closing():
            self._writer.write_eof()
        self._writer.close()
