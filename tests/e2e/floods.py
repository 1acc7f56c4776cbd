"""Floods by one API key while another one asks: long texts, slow image hosts, names without an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.e2e.service import MODEL
from tests.frontend.media.hostile import response

KEYS = {"alice": "sk-alice-0123456789", "bob": "sk-bob-0123456789"}
SETTINGS = {"TESSERA_API_KEYS": ", ".join(f"{key} {name}" for name, key in KEYS.items())}

ACCENTS = "e\u0301" * 1_900_000
"""A text that has no place where it could be cut, as long as an input may be."""


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@dataclass(slots=True)
class Asker:
    """Asks one frontend with one key."""

    url: str
    name: str
    client: httpx.AsyncClient = field(default_factory=lambda: httpx.AsyncClient(timeout=300))

    async def embed(self, *inputs: Any, **options: Any) -> httpx.Response:
        body = {"model": MODEL, "input": inputs, "truncate": "END", **options}
        return await self.client.post(
            f"{self.url}/v1/embeddings",
            content=json.dumps(body, ensure_ascii=False).encode(),
            headers={"authorization": f"Bearer {KEYS[self.name]}", "content-type": "application/json"},
        )

    async def images(self, *urls: str, **options: Any) -> httpx.Response:
        return await self.embed(*([image(url)] for url in urls), **options)

    async def hang_up(self, *inputs: str) -> None:
        """Send a request whole, and close the connection a second later."""
        where = urlsplit(self.url)
        _, writer = await asyncio.open_connection(where.hostname, where.port)
        data = json.dumps({"model": MODEL, "input": inputs}, ensure_ascii=False).encode()
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[self.name]}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        try:
            with suppress(ConnectionError):
                writer.write(head.encode() + data)
                await writer.drain()
                await asyncio.sleep(1.0)
        finally:
            # A connection that closes waits for what is still to be sent, which nobody reads any more.
            writer.transport.abort()

    async def in_flight(self) -> int:
        """Requests that the frontend counts, of all keys."""
        headers = {"authorization": f"Bearer {KEYS[self.name]}"}
        text = (await self.client.get(f"{self.url}/metrics", headers=headers)).raise_for_status().text
        lines = [line for line in text.splitlines() if line.startswith("tessera_requests_in_flight")]
        assert lines
        return sum(int(float(line.rpartition(" ")[2])) for line in lines)


@asynccontextmanager
async def asking(url: str) -> AsyncIterator[tuple[Asker, Asker]]:
    """Alice, who floods, and Bob."""
    alice, bob = Asker(url, "alice"), Asker(url, "bob")
    async with alice.client, bob.client:
        yield alice, bob


@dataclass(slots=True)
class SlowHost:
    """A host of images: ``/slow`` sends a byte now and then until it may end, all else at once."""

    data: bytes
    port: int = 0
    slow: int = 0
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            head = await reader.readuntil(b"\r\n\r\n")
            whole = response(self.data, "connection: close")
            if head.startswith(b"GET /slow"):
                self.slow += 1
                try:
                    for at in range(len(whole)):
                        if self.may_end.is_set():
                            whole = whole[at:]
                            break
                        writer.write(whole[at : at + 1])
                        await writer.drain()
                        with suppress(TimeoutError):
                            await asyncio.wait_for(self.may_end.wait(), 0.5)
                finally:
                    self.slow -= 1
            writer.write(whole)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def slow_host(data: bytes) -> AsyncIterator[SlowHost]:
    host = SlowHost(data)
    listener = await asyncio.start_server(host.answer, "127.0.0.1", 0)
    host.port = listener.sockets[0].getsockname()[1]
    try:
        yield host
    finally:
        host.may_end.set()
        listener.close()
