"""One call to one instance: round trips, errors, cancellation, deadlines, leaks."""

from __future__ import annotations

import asyncio
import gc
import signal
import tracemalloc
from collections.abc import Callable, Iterator

import msgspec
import pytest

from tessera import wire
from tessera.errors import (
    DeadlineExceeded,
    InvalidInput,
    Overloaded,
    PayloadTooLarge,
    ProtocolError,
    RequestCancelled,
    TesseraError,
    Unavailable,
)
from tests.rpc.conftest import Deployment, echo, echoing
from tests.signals import freeze
from tests.waiting import all_turns, until

MIB = 1 << 20


class Recorder:
    """A handler that runs until its caller gives up, and says so."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self, message: wire.Request) -> wire.Reply:
        self.begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError("nobody cancelled")


async def test_a_round_trip(deployment: Deployment) -> None:
    server = await deployment.serve(echoing)
    client = await deployment.client()
    assert client.instances() == [server.instance]
    reply = await client.call(server.instance, echo(3), timeout=60)
    assert isinstance(reply, wire.EmbedReply) and reply.outputs[0].rows == b"ttt"


async def test_forty_megabytes_go_both_ways(deployment: Deployment) -> None:
    server = await deployment.serve(echoing)
    client = await deployment.client()
    reply = await client.call(server.instance, echo(40 * MIB), timeout=60)
    assert isinstance(reply, wire.EmbedReply) and len(reply.outputs[0].rows) == 40 * MIB


@pytest.fixture
def traced() -> Iterator[Callable[[], int]]:
    """Count the bytes that Python has taken since."""
    tracemalloc.start(1)
    try:
        yield lambda: tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


async def test_a_message_is_not_kept_while_its_answer_is_waited_for(
    deployment: Deployment, traced: Callable[[], int]
) -> None:
    worker = await deployment.spawn("slow")
    client = await deployment.client()
    request, before = echo(24 * MIB), traced()
    call = asyncio.create_task(client.call(client.instances()[0], request, timeout=600))
    assert worker.stdout is not None
    assert await asyncio.wait_for(worker.stdout.readline(), 60) == b"begun\n"
    await until(lambda: traced() - before < MIB)
    call.cancel()


async def test_a_clients_long_messages_are_written_a_few_at_a_time(
    deployment: Deployment, traced: Callable[[], int]
) -> None:
    """An instance that takes none makes them wait as what they were made of."""
    worker = await deployment.spawn("echo")
    client = await deployment.client()
    instance = client.instances()[0]
    await client.call(instance, echo(), timeout=60)
    freeze(worker.pid)
    request, before = msgspec.structs.replace(echo(8 * MIB), client="alice"), traced()
    calls = [asyncio.create_task(client.call(instance, request, timeout=600)) for _ in range(12)]
    await until(lambda: traced() - before >= 16 * MIB)
    await all_turns()
    assert traced() - before < 17 * MIB
    worker.send_signal(signal.SIGCONT)
    for reply in await asyncio.gather(*calls):
        assert isinstance(reply, wire.EmbedReply) and len(reply.outputs[0].rows) == 8 * MIB


async def test_a_message_that_no_instance_takes_is_the_callers_fault(deployment: Deployment) -> None:
    server = await deployment.serve(echoing)
    client = await deployment.client()
    with pytest.raises(PayloadTooLarge):
        await client.call(server.instance, echo(257 * MIB), timeout=60)
    # The instance is none the worse for it.
    await client.call(server.instance, echo(), timeout=60)


async def test_errors_keep_their_class_and_what_they_name(deployment: Deployment) -> None:
    async def handler(message: wire.Request) -> wire.Reply:
        assert isinstance(message, wire.EmbedRequest)
        if message.items[0].param == "full":
            raise Overloaded("full", retry_after=2.5)
        raise InvalidInput("bad", param=message.items[0].param)

    server = await deployment.serve(handler)
    client = await deployment.client()
    with pytest.raises(Overloaded, match="full") as full:
        await client.call(server.instance, echo(param="full"), timeout=60)
    assert full.value.retry_after == 2.5
    with pytest.raises(InvalidInput) as bad:
        await client.call(server.instance, echo(param="input[7]"), timeout=60)
    assert bad.value.param == "input[7]"


async def test_an_unexpected_error_does_not_say_what_is_inside(deployment: Deployment) -> None:
    async def handler(message: wire.Request) -> wire.Reply:
        raise KeyError("a secret")

    server = await deployment.serve(handler)
    client = await deployment.client()
    with pytest.raises(TesseraError, match="internal error") as caught:
        await client.call(server.instance, echo(), timeout=60)
    assert "secret" not in caught.value.message


async def test_another_version_is_refused_by_either_side(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await deployment.serve(echoing)
    client = await deployment.client()
    right = wire.encode
    monkeypatch.setattr(wire, "encode", lambda message: b"\x63" + right(message)[1:])
    # The server's answer has the wrong version as well here, so that the caller refuses it in turn.
    with pytest.raises(ProtocolError, match=r"version \d+, its peer sent version 99"):
        await client.call(server.instance, echo(), timeout=60)
    monkeypatch.setattr(
        wire, "encode", lambda m: b"\x63" + right(m)[1:] if isinstance(m, wire.Calls) else right(m)
    )
    with pytest.raises(ProtocolError, match=r"version \d+, its peer sent version 99"):
        await client.call(server.instance, echo(), timeout=60)


async def test_a_cancelled_call_cancels_its_handler(deployment: Deployment) -> None:
    handler = Recorder()
    server = await deployment.serve(handler)
    client = await deployment.client()
    call = asyncio.ensure_future(client.call(server.instance, echo(), timeout=60))
    await asyncio.wait_for(handler.begun.wait(), 60)
    assert server.in_flight == 1
    call.cancel()
    await asyncio.wait_for(handler.cancelled.wait(), 60)
    await until(lambda: server.in_flight == 0)
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_cancelled_call_keeps_nothing_for_the_collector(deployment: Deployment) -> None:
    """A request may hold images, and full collections are rare."""
    arrived = asyncio.Event()

    async def held(message: wire.Request) -> wire.Reply:
        arrived.set()
        await asyncio.sleep(60)
        return await echoing(message)

    def is_it(found: object) -> bool:
        return isinstance(found, wire.EmbedRequest) and "cancelled" in [item.param for item in found.items]

    server = await deployment.serve(held)
    client = await deployment.client()
    gc.collect()
    gc.disable()
    try:
        call = asyncio.ensure_future(client.call(server.instance, echo(param="cancelled"), timeout=60))
        await asyncio.wait_for(arrived.wait(), 60)
        call.cancel()
        await asyncio.wait({call})
        await until(lambda: server.in_flight == client.under_way == 0)
        del call
        # Both ends are here, and neither has it any more.
        await until(lambda: not any(is_it(found) for found in gc.get_objects()))
    finally:
        gc.enable()


async def test_a_deadline_ends_the_call_and_the_work(deployment: Deployment) -> None:
    handler = Recorder()
    server = await deployment.serve(handler)
    client = await deployment.client()
    for timeout in (0.3, 2.0, 8.0):
        with pytest.raises(DeadlineExceeded):
            await client.call(server.instance, echo(), timeout=timeout)
        # A busy machine may not have brought it there by then.
        if handler.begun.is_set():
            break
    await asyncio.wait_for(handler.cancelled.wait(), 60)
    with pytest.raises(DeadlineExceeded):
        await client.call(server.instance, echo(), timeout=0.0)


async def test_work_that_the_instance_gave_up_may_be_done_elsewhere(deployment: Deployment) -> None:
    async def handler(message: wire.Request) -> wire.Reply:
        raise RequestCancelled("the caller went away")

    server = await deployment.serve(handler)
    client = await deployment.client()
    with pytest.raises(Unavailable, match="dropped"):
        await client.call(server.instance, echo(), timeout=60)


async def test_an_instance_that_is_not_there(deployment: Deployment) -> None:
    await deployment.serve(echoing)
    client = await deployment.client()
    with pytest.raises(Unavailable):
        await client.call(12345, echo(), timeout=60)


async def test_a_killed_instance(deployment: Deployment) -> None:
    process = await deployment.spawn("slow")
    client = await deployment.client()
    (instance,) = client.instances()
    call = asyncio.ensure_future(client.call(instance, echo(), timeout=60))
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 60) == b"begun\n"
    process.send_signal(signal.SIGKILL)
    # Found out, and not waited for: that would be DeadlineExceeded.
    with pytest.raises(Unavailable):
        await call
    with pytest.raises(Unavailable):
        await client.call(instance, echo(), timeout=60)


async def test_a_frozen_instance_holds_nobody_for_longer_than_the_deadline(deployment: Deployment) -> None:
    process = await deployment.spawn("slow")
    client = await deployment.client()
    (instance,) = client.instances()
    freeze(process.pid)
    async with asyncio.timeout(60):
        with pytest.raises((Unavailable, DeadlineExceeded)):
            await client.call(instance, echo(), timeout=1.0)
    process.send_signal(signal.SIGCONT)


async def test_calls_leave_no_tasks_behind(deployment: Deployment) -> None:
    """Thousands of calls, some of them cancelled, leave as many tasks and futures as a few did."""
    server = await deployment.serve(echoing)
    client = await deployment.client()

    async def calls(count: int) -> None:
        for start in range(0, count, 250):
            made = [
                asyncio.ensure_future(client.call(server.instance, echo(), timeout=60)) for _ in range(250)
            ]
            if start % 500 == 0:
                await asyncio.sleep(0)
                made[0].cancel()
            await asyncio.gather(*made, return_exceptions=True)
        await until(lambda: server.in_flight == 0)
        await asyncio.sleep(0.1)

    def alive() -> tuple[int, int]:
        gc.collect()
        # By type: isinstance would ask proxies of other libraries what they are.
        futures = sum(issubclass(type(thing), asyncio.Future) for thing in gc.get_objects())
        return len(asyncio.all_tasks()), futures

    await calls(500)
    before = alive()
    await calls(2000)

    def as_before() -> bool:
        tasks, futures = alive()
        return tasks <= before[0] + 2 and futures <= before[1] + 20

    # The runtime's threads let go of the last ones when they come to run next.
    await until(as_before, said=lambda: (before, alive()))
