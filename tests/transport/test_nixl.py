"""What only NIXL can get wrong: peers that it reaches through a network."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.signals import freeze
from tests.waiting import until
from transport_peer import BLOCK_ROWS, Peer, outbox_config, same_bits, sample

from tessera.errors import HandOffError, LeaseExpired
from tessera.transport.inbox import Inbox
from tessera.transport.kinds.nixl import NixlTransport
from tessera.transport.kinds.nixl_agent import nixl_missing
from tessera.transport.outbox import Outbox

pytestmark = pytest.mark.skipif(nixl_missing() is not None, reason="needs nixl")


@pytest.fixture
def distant() -> Iterator[tuple[Peer, Peer]]:
    """A writer and a reader between which only TCP works, as between two hosts."""
    # NIXL refuses a list that leaves out the GPUs of a host that has some.
    reachable = "tcp,self,cuda_copy" if torch.cuda.is_available() else "tcp,self"
    peers = Peer(UCX_TLS=reachable), Peer(UCX_TLS=reachable)
    yield peers
    for peer in peers:
        peer.close()


async def test_rows_cross_a_network(distant: tuple[Peer, Peer]) -> None:
    writer, reader = distant
    infos = await writer.call("open_outbox", outbox_config(transport="nixl", capacity_rows=512 * BLOCK_ROWS))
    info = await reader.call("open_inbox", "nixl", "encoder-1", infos)
    for seed, rows in enumerate((1, 20, 300 * BLOCK_ROWS)):
        handle = await writer.call("publish", seed, rows, info)
        assert same_bits(torch.tensor(await reader.call("fetch", handle)), sample(seed, rows))
    assert await writer.call("drain", 60.0)
    assert (await writer.call("stats")).released == 3


async def test_a_frozen_writer_costs_a_timeout_and_no_memory(distant: tuple[Peer, Peer]) -> None:
    writer, reader = distant
    config = outbox_config(transport="nixl", lease_seconds=5.0)
    infos = await writer.call("open_outbox", config)
    info = await reader.call("open_inbox", "nixl,inline", "encoder-1", infos, 2.0)
    first = await writer.call("publish", 1, 20, info)
    assert same_bits(torch.tensor(await reader.call("fetch", first)), sample(1, 20))
    second = await writer.call("publish", 2, 20, info)
    freeze(writer.pid)
    outcome, beats = await reader.call("watched_fetch", second)
    assert outcome == "transport_unavailable"
    # It waited for the two seconds that it was given, and kept the loop from nobody.
    assert beats > 10
    quarantined, _ = await reader.call("staging")
    assert quarantined == 1
    writer.signal(signal.SIGCONT)

    async def staging_is_free() -> bool:
        return await reader.call("staging") == (0, 0)

    await until(staging_is_free)
    # Both sides go on with each other.
    assert await writer.call("drain", 60.0)
    assert await reader.call("reader_kinds") == ("nixl", "inline")
    third = await writer.call("publish", 3, 20, info)
    assert same_bits(torch.tensor(await reader.call("fetch", third)), sample(3, 20))


async def test_a_killed_writer_is_noticed(distant: tuple[Peer, Peer]) -> None:
    writer, reader = distant
    infos = await writer.call("open_outbox", outbox_config(transport="nixl"))
    info = await reader.call("open_inbox", "nixl,inline", "encoder-1", infos, 2.0)
    handle = await writer.call("publish", 1, 20, info)
    assert (await reader.call("watched_fetch", handle))[0] == "delivered"
    handle = await writer.call("publish", 2, 20, info)
    writer.kill()
    assert (await reader.call("watched_fetch", handle))[0] == "transport_unavailable"
    assert await reader.call("reader_kinds") == ("inline",)
    assert await reader.call("staging") == (0, 0)


async def test_an_image_larger_than_the_staging_memory_is_refused(
    make_outbox: Callable[..., Outbox], make_inbox: Callable[..., Inbox]
) -> None:
    outbox = make_outbox(transport="nixl", capacity_rows=512 * BLOCK_ROWS)
    inbox = make_inbox("nixl", staging_mb=1)
    inbox.connect("encoder-1", outbox.infos())
    slot = await outbox.slab.acquire(512 * BLOCK_ROWS, timeout=1)
    handle = await outbox.publish(slot, inbox.reader_info("encoder-1"))
    with pytest.raises(HandOffError, match="never fit the NIXL staging memory"):
        await inbox.fetch(handle)
    assert await outbox.slab.drain(timeout=60)


async def test_reads_wait_for_staging_memory(
    make_outbox: Callable[..., Outbox], make_inbox: Callable[..., Inbox]
) -> None:
    # More than half of the staging memory, 1 MiB.
    rows = 160 * BLOCK_ROWS
    outbox = make_outbox(transport="nixl", capacity_rows=4 * rows)
    inbox = make_inbox("nixl", staging_mb=1)
    inbox.connect("encoder-1", outbox.infos())
    handles = []
    for seed in range(4):
        slot = await outbox.slab.acquire(rows, timeout=1)
        slot.rows.copy_(sample(seed, rows))
        handles.append(await outbox.publish(slot, inbox.reader_info("encoder-1")))
    for seed, found in enumerate(await asyncio.gather(*map(inbox.fetch, handles))):
        assert same_bits(found, sample(seed, rows))


async def test_closing_takes_back_every_registration(
    make_outbox: Callable[..., Outbox], make_inbox: Callable[..., Inbox]
) -> None:
    outbox = make_outbox(transport="nixl", lease_seconds=0.01)
    inbox = make_inbox("nixl")
    inbox.connect("encoder-1", outbox.infos())
    slot = await outbox.slab.acquire(1, timeout=1)
    handle = await outbox.publish(slot, inbox.reader_info("encoder-1"))
    assert await outbox.slab.drain(timeout=60)
    with pytest.raises(LeaseExpired):
        await inbox.fetch(handle)
    agents = []
    for transport in (outbox._transports["nixl"], inbox._transports["nixl"]):
        assert isinstance(transport, NixlTransport)
        assert transport._agent.registrations > 0
        agents.append(transport._agent)
    inbox.close()
    outbox.close()
    assert [agent.registrations for agent in agents] == [0, 0]
    assert [agent._agent for agent in agents] == [None, None]


async def test_a_peer_listens_where_it_is_told_to(distant: tuple[Peer, Peer]) -> None:
    writer, _ = distant
    await writer.call(
        "open_outbox",
        outbox_config(transport="nixl", nixl_interfaces="lo"),
    )
    assert await writer.call("listening") == {"127.0.0.1"}


async def test_an_idle_agents_threads_sleep(make_outbox: Callable[..., Outbox]) -> None:
    before = set(os.listdir("/proc/self/task"))
    make_outbox(transport="nixl")
    began = set(os.listdir("/proc/self/task")) - before

    def asleep() -> bool:
        return {state(thread) for thread in began & set(os.listdir("/proc/self/task"))} <= {"S", ""}

    await until(asleep)


def state(thread: str) -> str:
    """A thread's letter in /proc: R while it runs, S while it sleeps; empty for one that has gone."""
    try:
        return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
