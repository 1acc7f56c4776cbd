"""Which instances may be given work."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from tessera import wire
from tessera.errors import EngineFailed, Unavailable
from tessera.rpc import Client, Peers
from tests.rpc.conftest import INFO, Deployment, echo, echoing
from tests.signals import freeze
from tests.waiting import until


def check(info: wire.WorkerInfo) -> str | None:
    return None if info.fingerprint == "good" else f"it serves {info.fingerprint}"


MakePeers = Callable[..., Peers]


@pytest.fixture
async def make_peers() -> AsyncIterator[MakePeers]:
    made: list[Peers] = []

    def make(client: Client, **options: object) -> Peers:
        made.append(Peers(client, check, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for peers in made:
        await peers.close()


async def test_an_instance_describes_itself_before_it_gets_work(
    deployment: Deployment, make_peers: MakePeers
) -> None:
    asked = asyncio.Event()
    answer = asyncio.Event()

    async def handler(message: wire.Request) -> wire.Reply:
        assert isinstance(message, wire.Describe)
        asked.set()
        await answer.wait()
        return INFO

    joined: list[tuple[int, str]] = []
    server = await deployment.serve(handler)
    peers = make_peers(
        await deployment.client(), joined=lambda instance, info: joined.append((instance, info.fingerprint))
    )
    await asyncio.wait_for(asked.wait(), 60)
    assert not peers.ready and not joined
    assert not await peers.wait(0.05)
    answer.set()
    assert await peers.wait(60)
    assert dict(peers.ready) == {server.instance: INFO}
    assert joined == [(server.instance, "good")]


async def test_another_model_is_refused_and_said_once(
    deployment: Deployment, make_peers: MakePeers, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    async def handler(message: wire.Request) -> wire.Reply:
        nonlocal calls
        calls += 1
        return msgspec.structs.replace(INFO, fingerprint="bad")

    good = await deployment.serve(echoing)
    await deployment.serve(handler)
    peers = make_peers(await deployment.client(2))
    assert await peers.wait(60)
    await until(lambda: calls == 1)
    await asyncio.sleep(0.3)
    assert list(peers.ready) == [good.instance]
    assert calls == 1
    assert [record.message for record in caplog.records if "it serves bad" in record.message] != []


async def test_a_suspect_is_set_aside_until_it_answers(deployment: Deployment, make_peers: MakePeers) -> None:
    process = await deployment.spawn("echo")
    client = await deployment.client()
    (instance,) = client.instances()
    peers = make_peers(client)
    assert await peers.wait(60)
    freeze(process.pid)
    peers.suspect(instance)
    assert not peers.ready
    peers.suspect(instance)
    await asyncio.sleep(0.5)
    assert not peers.ready, "a frozen process cannot have answered"
    process.send_signal(signal.SIGCONT)
    assert await peers.wait(60)
    await client.call(instance, echo(), timeout=60)


async def test_a_killed_instance_does_not_come_back(deployment: Deployment, make_peers: MakePeers) -> None:
    process = await deployment.spawn("echo")
    client = await deployment.client()
    (instance,) = client.instances()
    peers = make_peers(client)
    assert await peers.wait(60)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    with pytest.raises(Unavailable):
        await client.call(instance, echo(), timeout=60)
    peers.suspect(instance)
    # It stays in discovery until its lease runs out, and is not ready for all that.
    await asyncio.sleep(0.5)
    assert instance in client.instances() and not peers.ready
    waiting = asyncio.ensure_future(peers.wait_back(600, 600))
    await asyncio.sleep(0)
    peers.hurry(0.1)
    assert not await asyncio.wait_for(waiting, 60)


async def test_a_restarted_worker_is_found_and_each_that_left_is_told(
    deployment: Deployment, make_peers: MakePeers
) -> None:
    client = await Client.connect(deployment.runtime(), deployment.address)
    joined: list[int] = []
    left: list[int] = []
    peers = make_peers(client, joined=lambda instance, _: joined.append(instance), left=left.append)
    assert not await peers.wait(0.1)
    for _ in range(2):
        process = await deployment.spawn("echo")
        assert await peers.wait(60)
        process.send_signal(signal.SIGTERM)
        await process.wait()
        await until(lambda: not peers.ready and left == joined)
    assert len(set(joined)) == 2


async def test_an_instance_that_cannot_be_joined_is_reported(
    deployment: Deployment, make_peers: MakePeers, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = 0

    def joined(instance: int, info: wire.WorkerInfo) -> None:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise RuntimeError("not now")

    await deployment.serve(echoing)
    peers = make_peers(await deployment.client(), joined=joined)
    assert await peers.wait(60)
    assert attempts == 3
    assert any("not now" in record.getMessage() for record in caplog.records)


async def test_close_leaves_no_task(deployment: Deployment) -> None:
    await deployment.serve(echoing)
    before = asyncio.all_tasks()
    peers = Peers(await deployment.client(), check)
    await peers.wait(60)
    await peers.close()
    # A call of the runtime ends a moment after its last reply.
    await until(lambda: asyncio.all_tasks() <= before)


async def test_a_killed_idle_instance_is_found_out_by_asking(
    deployment: Deployment, make_peers: MakePeers
) -> None:
    process = await deployment.spawn()
    peers = make_peers(await deployment.client(), check_every=0.2)
    assert await peers.wait(60)
    process.send_signal(signal.SIGKILL)
    await until(lambda: not peers.ready)
    # Before its lease ran out: nobody called it and discovery still lists it.
    assert peers.client.instances()


async def test_calls_inside_a_frozen_instance_end_and_it_comes_back(
    deployment: Deployment, make_peers: MakePeers
) -> None:
    process = await deployment.spawn("slow")
    peers = make_peers(await deployment.client(), check_every=0.2)
    assert await peers.wait(60)
    (instance,) = peers.ready
    call = asyncio.create_task(peers.call(instance, echo(), timeout=60))
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 60) == b"begun\n"
    assert not call.done()
    freeze(process.pid)
    with pytest.raises(Unavailable, match="stopped answering"):
        await asyncio.wait_for(call, 60)
    assert not peers.ready
    process.send_signal(signal.SIGCONT)
    assert await peers.wait(60)


async def test_a_cancelled_call_leaves_nothing_behind(deployment: Deployment, make_peers: MakePeers) -> None:
    await deployment.spawn("slow")
    peers = make_peers(await deployment.client(), check_every=0.2)
    assert await peers.wait(60)
    (instance,) = peers.ready
    call = asyncio.create_task(peers.call(instance, echo(), timeout=60))
    await asyncio.sleep(0.2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    # It is asked how it is now and then.
    await until(lambda: not peers.client.under_way)
    await asyncio.sleep(1.0)
    assert instance in peers.ready


async def test_the_absence_of_all_is_waited_out_for_a_while_only(
    deployment: Deployment, make_peers: MakePeers
) -> None:
    peers = make_peers(await deployment.client(instances=0))
    earlier = asyncio.ensure_future(asyncio.sleep(1.0))
    assert not await peers.wait_back(2.0, 60)
    assert earlier.done()
    # It has been too long by now: nobody waits again.
    again = asyncio.ensure_future(peers.wait_back(2.0, 60))
    await asyncio.sleep(0)
    assert again.done() and not again.result()
    waiting = asyncio.ensure_future(peers.wait_back(30, 60))
    await deployment.serve(echoing)
    assert await waiting


async def test_a_pulse_brings_what_an_instance_takes_now(
    deployment: Deployment, make_peers: MakePeers
) -> None:
    tokens = [100]

    async def handler(message: wire.Request) -> wire.Reply:
        return msgspec.structs.replace(INFO, tokens=tokens[0])

    server = await deployment.serve(handler)
    peers = make_peers(await deployment.client(), check_every=0.05)
    await until(lambda: server.instance in peers.ready)
    assert peers.ready[server.instance].tokens == 100
    tokens[0] = 7
    await until(lambda: peers.ready[server.instance].tokens == 7)


async def test_an_instance_that_refuses_to_describe_itself_is_set_aside(
    deployment: Deployment, make_peers: MakePeers
) -> None:
    refuses = False

    async def handler(message: wire.Request) -> wire.Reply:
        if refuses:
            raise EngineFailed("odd")
        return INFO

    server = await deployment.serve(handler)
    peers = make_peers(await deployment.client(), check_every=0.05)
    await until(lambda: server.instance in peers.ready)
    refuses = True
    await until(lambda: not peers.ready)
    refuses = False
    await until(lambda: server.instance in peers.ready)
