"""How long a message takes to be joined, by which the next one of its sender waits unjoined."""

from __future__ import annotations

import asyncio
import time

import pytest

from tessera_kserve.receiving import in_steps

JOIN_SECONDS = 0.05


async def read(arrived: asyncio.Event) -> bytes:
    """Wait for a message for a while, and join it on the loop, as gRPC does."""
    await arrived.wait()
    time.sleep(JOIN_SECONDS)  # noqa: ASYNC251 - the loop has to stand
    return b"message"


async def at_once() -> None:
    """Go on without a pause."""


async def test_the_wait_for_a_message_is_no_part_of_it() -> None:
    arrived = asyncio.Event()
    reading = asyncio.create_task(in_steps(read(arrived), at_once))
    await asyncio.sleep(40 * JOIN_SECONDS)
    before = time.monotonic()
    arrived.set()
    raw, stood = await reading
    assert raw == b"message"
    assert JOIN_SECONDS <= stood <= time.monotonic() - before


async def test_a_reader_that_leaves_takes_its_read_along() -> None:
    left = asyncio.Event()

    async def silent() -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
        raise AssertionError

    reading = asyncio.create_task(in_steps(silent(), at_once))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert left.is_set()


async def test_what_a_read_raises_comes_out() -> None:
    async def failing() -> bytes:
        await asyncio.sleep(0)
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError, match="gone"):
        await in_steps(failing(), at_once)


async def test_a_message_that_has_come_waits_for_its_pause() -> None:
    arrived, paused, over = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def pause() -> None:
        paused.set()
        await over.wait()

    reading = asyncio.create_task(in_steps(read(arrived), pause))
    await asyncio.sleep(0)
    arrived.set()
    await paused.wait()
    await asyncio.sleep(0)
    assert not reading.done()
    over.set()
    raw, stood = await reading
    assert raw == b"message" and stood >= JOIN_SECONDS
