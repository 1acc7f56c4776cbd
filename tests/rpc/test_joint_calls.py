"""Calls that travel together: each keeps its own reply, error, deadline and cancellation."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator

import pytest

from tessera import tracing, wire
from tessera.errors import DeadlineExceeded, InvalidInput, Unavailable
from tessera.rpc import Client, Server
from tessera.rpc import client as client_module
from tests.rpc.conftest import Deployment, echo, echoed
from tests.tracing.collector import Collector
from tests.tracing.conftest import collector as collector
from tests.waiting import until

KIB = 1 << 10


class Held:
    """A handler that answers each request when its ``param`` is released; records what it gets."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.cancelled: list[str] = []
        self.traces: dict[str, dict[str, str]] = {}
        self._released: Counter[str] = Counter()
        self._changed = asyncio.Condition()

    async def __call__(self, message: wire.Request) -> wire.Reply:
        assert isinstance(message, wire.EmbedRequest)
        name = message.items[0].param
        self.begun.append(name)
        self.traces[name] = message.trace
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._released[name])
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        if name.startswith("bad"):
            raise InvalidInput("bad", param=name)
        return echoed(message)

    async def release(self, *names: str) -> None:
        async with self._changed:
            self._released.update(names)
            self._changed.notify_all()


@pytest.fixture
def payloads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[wire.Calls | wire.Replies]]:
    """What this process writes for the wire."""
    written: list[wire.Calls | wire.Replies] = []
    encode = wire.encode

    def recording(message: wire.Message) -> bytes:
        if isinstance(message, wire.Calls | wire.Replies):
            written.append(message)
        return encode(message)

    monkeypatch.setattr(wire, "encode", recording)
    yield written


def sizes(payloads: list[wire.Calls | wire.Replies]) -> list[int]:
    """The number of requests in each message that was sent."""
    return [len(sent.requests) for sent in payloads if isinstance(sent, wire.Calls)]


class Calling:
    """Calls by name that were made at the same moment."""

    def __init__(self, client: Client, server: Server, names: str, *, timeout: float = 30) -> None:
        self._calls = {
            name: asyncio.ensure_future(client.call(server.instance, echo(param=name), timeout=timeout))
            for name in names.split()
        }

    def __getitem__(self, name: str) -> asyncio.Task[wire.Reply]:
        return self._calls[name]

    async def end(self) -> None:
        for call in self._calls.values():
            call.cancel()
        await asyncio.gather(*self._calls.values(), return_exceptions=True)


async def test_calls_that_meet_travel_together_and_come_back_in_any_order(
    deployment: Deployment, payloads: list[wire.Calls | wire.Replies]
) -> None:
    held = Held()
    server = await deployment.serve(held)
    client = await deployment.client()
    calls = Calling(client, server, "a b c d e")
    await until(lambda: len(held.begun) == 5)
    assert sizes(payloads) == [5]
    assert server.in_flight == client.under_way == 5
    for done, left in (("d", 4), ("a", 3)):
        await held.release(done)
        await asyncio.wait_for(calls[done], 60)
        assert server.in_flight == client.under_way == left
    await held.release("b", "c", "e")
    await asyncio.gather(calls["b"], calls["c"], calls["e"])
    # What was ready at the same moment came in one message.
    replies = [set(sent.replies) for sent in payloads if isinstance(sent, wire.Replies)]
    assert replies == [{3}, {0}, {1, 2, 4}]
    assert server.in_flight == client.under_way == 0


async def test_calls_wait_for_each_other_only_while_others_are_under_way(
    deployment: Deployment, payloads: list[wire.Calls | wire.Replies], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held()
    server = await deployment.serve(held)
    client = await deployment.client()
    # For longer than the test may take.
    monkeypatch.setattr(client_module, "_LINGER_SHARE", 1e9)
    monkeypatch.setattr(client_module, "_LINGER_SECONDS", 300)
    for name in ("a", "b"):
        await held.release(name)
        await Calling(client, server, name)[name]
    held_up = Calling(client, server, "c")
    await until(lambda: "c" in held.begun)
    monkeypatch.setattr(client_module, "_LINGER_SECONDS", 2.0)
    calls = [Calling(client, server, "d")]
    await asyncio.sleep(0.01)
    calls.append(Calling(client, server, "e"))
    await until(lambda: len(held.begun) == 5)
    await held.release("c", "d", "e")
    await asyncio.gather(held_up["c"], calls[0]["d"], calls[1]["e"])
    assert sizes(payloads) == [1, 1, 1, 2]


async def test_one_cancelled_of_many_stops_its_own_work_alone(
    deployment: Deployment, payloads: list[wire.Calls | wire.Replies]
) -> None:
    held = Held()
    server = await deployment.serve(held)
    client = await deployment.client()
    calls = Calling(client, server, "a b c")
    await until(lambda: len(held.begun) == 3)
    assert sizes(payloads) == [3]
    calls["b"].cancel()
    await until(lambda: held.cancelled == ["b"])
    await until(lambda: server.in_flight == 2)
    await held.release("a")
    assert isinstance(await asyncio.wait_for(calls["a"], 60), wire.EmbedReply)
    # Nobody waits for any of them now: the stream itself ends.
    calls["c"].cancel()
    await until(lambda: held.cancelled == ["b", "c"])
    await until(lambda: server.in_flight == client.under_way == 0)
    assert calls["b"].cancelled() and calls["c"].cancelled()


async def test_one_that_is_cancelled_before_it_arrives_is_stopped_there(deployment: Deployment) -> None:
    held = Held()
    server = await deployment.serve(held)
    client = await deployment.client()
    calls = Calling(client, server, "a b c")
    # In the first round they are made, in the second they leave.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    calls["b"].cancel()
    await until(lambda: held.begun in (["a", "b", "c"], ["a", "c"]))
    await until(lambda: server.in_flight == 2)
    await held.release("a", "c")
    await asyncio.gather(calls["a"], calls["c"])


async def test_the_deadline_of_one_leaves_the_others_alone(deployment: Deployment) -> None:
    held = Held()
    server = await deployment.serve(held)
    client = await deployment.client()
    calls = Calling(client, server, "a b")
    short = Calling(client, server, "short", timeout=2.0)
    await until(lambda: len(held.begun) == 3)
    with pytest.raises(DeadlineExceeded):
        await short["short"]
    await until(lambda: held.cancelled == ["short"])
    await held.release("a", "b")
    await asyncio.gather(calls["a"], calls["b"])


async def test_the_trace_of_each_is_its_own(
    deployment: Deployment, payloads: list[wire.Calls | wire.Replies], collector: Collector
) -> None:
    held = Held()
    server = await deployment.serve(held)
    client = await deployment.client()

    async def call(name: str) -> None:
        with tracing.serve(name, {}):
            await client.call(server.instance, echo(param=name), timeout=60)

    calls = [asyncio.ensure_future(call(name)) for name in ("a", "b", "c")]
    await held.release("a", "b", "c")
    await asyncio.gather(*calls)
    assert sizes(payloads) == [3]
    tracing.stop()
    collector.wait(lambda spans: len(spans) == 6)
    parents = {span.name: span for span in collector.all() if span.kind == "server"}
    for name in ("a", "b", "c"):
        _, trace, span, _ = held.traces[name]["traceparent"].split("-")
        (sent,) = (each for each in collector.trace(trace) if each.span == span)
        assert sent.kind == "client" and sent.parent == parents[name].span


async def test_the_error_of_one_is_its_own(deployment: Deployment) -> None:
    held = Held()
    server = await deployment.serve(held)
    client = await deployment.client()
    calls = Calling(client, server, "a bad-1 bad-2")
    await held.release("a", "bad-1", "bad-2")
    assert isinstance(await calls["a"], wire.EmbedReply)
    for name in ("bad-1", "bad-2"):
        with pytest.raises(InvalidInput) as caught:
            await calls[name]
        assert caught.value.param == name


async def test_a_request_that_cannot_be_written_fails_alone(deployment: Deployment) -> None:
    held = Held()
    server = await deployment.serve(held)
    client = await deployment.client()
    calls = Calling(client, server, "a \ud800 c")
    await held.release("a", "c")
    with pytest.raises(UnicodeEncodeError):
        await calls["\ud800"]
    await asyncio.gather(calls["a"], calls["c"])


async def test_a_large_message_travels_alone_and_many_make_several_calls(
    deployment: Deployment, payloads: list[wire.Calls | wire.Replies]
) -> None:
    async def handler(message: wire.Request) -> wire.Reply:
        return echoed(message)

    server = await deployment.serve(handler)
    client = await deployment.client()
    asked = [1, 1, 100 * KIB, 1, *[60 * KIB] * 10, *[1] * 300]
    replies = await asyncio.gather(*(client.call(server.instance, echo(size), timeout=60) for size in asked))
    for size, reply in zip(asked, replies, strict=True):
        assert isinstance(reply, wire.EmbedReply) and len(reply.outputs[0].rows) == size
    sent = [call for call in payloads if isinstance(call, wire.Calls)]
    assert [call.requests for call in sent if any(each.size > 64 * KIB for each in call.requests)] == [
        (echo(100 * KIB),)
    ]
    assert len(sent) == 4
    assert all(sum(each.size for each in call.requests) <= 512 * KIB for call in sent)
    assert all(len(call.requests) <= 256 for call in sent)


async def test_a_deployment_that_takes_shorter_messages_gets_them_one_by_one(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handler(message: wire.Request) -> wire.Reply:
        taken.append(len(echoed(message).outputs[0].rows))
        return echoed(message)

    taken: list[int] = []
    server = await deployment.serve(handler)
    monkeypatch.setenv("DYN_TCP_MAX_MESSAGE_SIZE", str(100 * KIB))
    caller = await deployment.call_from_elsewhere(server.instance, *"abcde", size=60 * KIB)
    assert await asyncio.wait_for(caller.wait(), 60) == 0
    assert taken == [60 * KIB] * 5


async def test_a_killed_worker_fails_only_what_it_has_not_answered(deployment: Deployment) -> None:
    process = await deployment.spawn("later")
    client = await deployment.client()
    (instance,) = client.instances()
    calls = {
        name: asyncio.ensure_future(client.call(instance, echo(param=name), timeout=60))
        for name in ("now-1", "later-1", "now-2", "later-2")
    }
    await asyncio.gather(calls["now-1"], calls["now-2"])
    assert client.under_way == 2
    process.send_signal(signal.SIGKILL)
    for name in ("later-1", "later-2"):
        with pytest.raises(Unavailable):
            await asyncio.wait_for(calls[name], 60)


async def test_a_caller_that_goes_away_stops_all_its_work(deployment: Deployment) -> None:
    held = Held()
    server = await deployment.serve(held)
    process = await deployment.call_from_elsewhere(server.instance, "a", "b", "c")
    await until(lambda: sorted(held.begun) == ["a", "b", "c"])
    process.send_signal(signal.SIGKILL)
    await until(lambda: sorted(held.cancelled) == ["a", "b", "c"])
    await until(lambda: server.in_flight == 0)


async def test_draining_waits_for_joint_calls(deployment: Deployment) -> None:
    held = Held()
    server = await deployment.serve(held)
    client = await deployment.client()
    calls = Calling(client, server, "a b c")
    await until(lambda: server.in_flight == 3)
    # Their response stream stands by now.
    await held.release("a")
    await calls["a"]
    stopping = asyncio.ensure_future(server.stop(timeout=20))
    await until(lambda: client.instances() == [])
    await held.release("b")
    await asyncio.wait_for(calls["b"], 60)
    assert not stopping.done()
    await held.release("c")
    assert isinstance(await calls["c"], wire.EmbedReply)
    await asyncio.wait_for(stopping, 60)
    assert server.in_flight == 0
