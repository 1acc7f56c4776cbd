"""Where work on a call is done: on the event loop, on a thread, or on the one that parses large bodies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from tessera.frontend.api.endpoint import LARGE_BODY_BYTES, LoopTurns
from tessera.frontend.exchange import Exchange
from tessera.logs import RequestLine
from tessera.tasks import Deadline
from tessera.turns import Threads
from tessera_kserve.inference import Inference


def exchange() -> Exchange:
    return Exchange(line=RequestLine("r"), deadline=Deadline.after(60.0), path="/")


@pytest.fixture
async def inference() -> AsyncIterator[Inference]:
    made = object.__new__(Inference)
    # What of the service is asked for here.
    service: Any = SimpleNamespace(turns=LoopTurns(), threads=Threads(2, "aside"), bodies=Threads(1, "body"))
    made._service = service
    yield made
    service.threads.close()
    service.bodies.close()


@pytest.mark.parametrize(
    ("nbytes", "body", "expected"),
    [
        (1000, True, threading.current_thread().name),
        (1000, False, threading.current_thread().name),
        (LARGE_BODY_BYTES, True, "aside"),
        (LARGE_BODY_BYTES + 1, True, "body"),
        (LARGE_BODY_BYTES + 1, False, "aside"),
    ],
)
async def test_large_bodies_alone_have_one_thread(
    inference: Inference, nbytes: int, body: bool, expected: str
) -> None:
    found = await inference.in_turn(lambda: threading.current_thread().name, exchange(), nbytes, body=body)
    assert found.startswith(expected)


async def test_an_answer_does_not_wait_for_a_body_that_is_parsed(inference: Inference) -> None:
    parsed = threading.Event()
    large = LARGE_BODY_BYTES + 1

    async def parse() -> bool:
        return await inference.in_turn(lambda: parsed.wait(60.0), exchange(), large, body=True)

    async def write() -> None:
        await inference.in_turn(parsed.set, exchange(), large)

    was_written, _ = await asyncio.gather(parse(), write())
    assert was_written
