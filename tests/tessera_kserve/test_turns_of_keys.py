"""A key's call over HTTP waits for its turn, and not for all calls of another key that came before it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from tests.frontend.alone import frontend_process

pytestmark = [pytest.mark.service, pytest.mark.kserve]

KEYS = {"alice": "sk-alice-0123456789", "bob": "sk-bob-0123456789"}
FLOOD = 600


def request(name: str) -> bytes:
    """Ask for the vector of a row that is empty, which needs no worker."""
    inputs = [
        {"name": tensor, "datatype": "INT64", "shape": [1, 1], "data": [0]}
        for tensor in ("input_ids", "attention_mask")
    ]
    body = json.dumps({"inputs": inputs}).encode()
    head = f"POST /v2/models/router/infer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS[name]}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def test_a_call_does_not_wait_for_all_of_another_key(checkpoint: Path, tmp_path: Path) -> None:
    settings = {"TESSERA_API_KEYS": ", ".join(f"{key} {name}" for name, key in KEYS.items())}
    with frontend_process(checkpoint, tmp_path, environment=settings) as alone:
        port, answered = int(alone.http.base_url.port or 0), []
        names = ["alice"] * FLOOD + ["bob"]
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in names]

        async def answer(name: str, reader: asyncio.StreamReader) -> None:
            status = await reader.readuntil(b"\r\n")
            assert status.startswith(b"HTTP/1.1 200"), status
            answered.append(name)

        # All have come when it goes on, his last.
        os.kill(alone.process.pid, signal.SIGSTOP)
        try:
            for name, (_, writer) in zip(names, connections, strict=True):
                writer.write(request(name))
        finally:
            os.kill(alone.process.pid, signal.SIGCONT)
        readers = [reader for reader, _ in connections]
        await asyncio.gather(*map(answer, names, readers))
        for _, writer in connections:
            writer.close()
        assert answered.index("bob") < FLOOD // 3
