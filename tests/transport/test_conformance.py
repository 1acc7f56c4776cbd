"""What every transport kind promises, with the two sides in two processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
from tests.shared_memory import mapped
from tests.signals import freeze
from transport_peer import BLOCK_ROWS, ROW_WIDTH, Peer, outbox_config, same_bits, sample

from tessera.errors import HandOffError, LeaseExpired, Overloaded, TransportUnavailable
from tessera.transport.inbox import Inbox
from tessera.transport.kinds import nixl
from tessera.transport.kinds.nixl_agent import nixl_missing
from tessera.transport.outbox import Outbox
from tessera.wire import Handle, SlabInfo

MakeInbox = Callable[..., Inbox]


@dataclass(frozen=True)
class Case:
    """A kind, and where the producer's slab lies."""

    kind: str
    device: str = "cpu"

    @property
    def leases(self) -> bool:
        """Whether readers hold a lease at all; inline rows are theirs once they are sent."""
        return self.kind != "inline"


_no_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
_no_nixl = pytest.mark.skipif(nixl_missing() is not None, reason="needs nixl")

CASES = [
    pytest.param(Case("inline"), id="inline"),
    pytest.param(Case("shm"), id="shm"),
    pytest.param(Case("nixl"), id="nixl", marks=_no_nixl),
    pytest.param(Case("cuda_ipc", "cuda"), id="cuda_ipc", marks=[pytest.mark.gpu, _no_cuda]),
    pytest.param(Case("inline", "cuda"), id="inline-cuda", marks=[pytest.mark.gpu, _no_cuda]),
    pytest.param(Case("shm", "cuda"), id="shm-cuda", marks=[pytest.mark.gpu, _no_cuda]),
    pytest.param(Case("nixl", "cuda"), id="nixl-cuda", marks=[pytest.mark.gpu, _no_cuda, _no_nixl]),
]
LEASING = [case for case in CASES if case.values[0].leases]

every_kind = pytest.mark.parametrize("case", CASES)
leasing_kinds = pytest.mark.parametrize("case", LEASING)


class Pair:
    """A producer in another process and a reader in this one."""

    def __init__(self, peer: Peer, inbox: Inbox, infos: tuple[SlabInfo, ...], config: Any) -> None:
        self.peer = peer
        self.inbox = inbox
        self.infos = infos
        self.config = config

    async def publish(self, seed: int, rows: int = 20, timeout: float = 1.0) -> Handle:
        reader = self.inbox.reader_info(self.config["producer"])
        handle: Handle = await self.peer.call("publish", seed, rows, reader, timeout)
        return handle

    async def stats(self) -> Any:
        return await self.peer.call("stats")

    async def expire(self) -> None:
        await self.peer.call("expire")

    async def settle(self) -> Any:
        """The producer's figures once no lease is outstanding."""
        assert await self.peer.call("drain", 60.0)
        return await self.stats()


async def connect(peer: Peer, make_inbox: MakeInbox, case: Case, **changes: Any) -> Pair:
    config = outbox_config(transport=case.kind, device=case.device, **changes)
    infos = await peer.call("open_outbox", config)
    inbox = make_inbox(case.kind)
    inbox.connect(config["producer"], infos)
    return Pair(peer, inbox, infos, config)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
async def test_rows_arrive_bit_for_bit(
    case: Case, dtype: torch.dtype, peer: Peer, make_inbox: MakeInbox
) -> None:
    pair = await connect(peer, make_inbox, case, dtype=dtype)
    for seed, rows in enumerate((1, BLOCK_ROWS, 3 * BLOCK_ROWS + 5)):
        handle = await pair.publish(seed, rows)
        assert handle.kind == case.kind
        assert handle.shape == (rows, ROW_WIDTH)
        got = await pair.inbox.fetch(handle)
        assert got.dtype == dtype
        assert same_bits(got, sample(seed, rows, dtype))
    assert pair.inbox.routes() == {"encoder-1": case.kind}


@every_kind
@pytest.mark.parametrize(
    ("width", "images"), [(8192, (1800, 4, 1023)), (3, (1, 33))], ids=["four times as wide", "odd"]
)
async def test_rows_of_any_width_and_number_arrive_bit_for_bit(
    case: Case, width: int, images: tuple[int, ...], peer: Peer, make_inbox: MakeInbox
) -> None:
    # A page of a family with three more rows for each of its own, beside small images.
    pair = await connect(
        peer, make_inbox, case, row_width=width, dtype=torch.bfloat16, capacity_rows=184 * BLOCK_ROWS
    )
    handles = [await pair.publish(seed, rows) for seed, rows in enumerate(images)]
    for seed, (handle, rows) in enumerate(zip(handles, images, strict=True)):
        assert handle.shape == (rows, width)
        assert same_bits(await pair.inbox.fetch(handle), sample(seed, rows, torch.bfloat16, width))
    assert (await pair.settle()).used_bytes == 0


@every_kind
async def test_rows_go_where_the_reader_wants_them(case: Case, peer: Peer, make_inbox: MakeInbox) -> None:
    pair = await connect(peer, make_inbox, case)
    cache = torch.zeros(64, ROW_WIDTH)
    handle = await pair.publish(3, 20)
    got = await pair.inbox.fetch(handle, lambda shape, dtype: cache[8 : 8 + shape[0]])
    assert got.data_ptr() == cache[8:].data_ptr()
    assert same_bits(cache[8:28], sample(3, 20))
    assert not cache[:8].any() and not cache[28:].any()


@every_kind
async def test_many_handles_at_once(case: Case, peer: Peer, make_inbox: MakeInbox) -> None:
    pair = await connect(peer, make_inbox, case)
    handles = [await pair.publish(seed, 10) for seed in range(8)]
    got = await asyncio.gather(*(pair.inbox.fetch(handle) for handle in handles))
    for seed, rows in enumerate(got):
        assert same_bits(rows, sample(seed, 10))
    assert (await pair.settle()).used_bytes == 0


@every_kind
async def test_release_frees_the_slot(case: Case, peer: Peer, make_inbox: MakeInbox) -> None:
    pair = await connect(peer, make_inbox, case)
    # More hand-offs than the slab has room for: each slot must have come back for the next.
    for seed in range(20):
        await pair.inbox.fetch(await pair.publish(seed, 4 * BLOCK_ROWS))
    stats = await pair.settle()
    assert (stats.used_bytes, stats.leased, stats.held, stats.expired) == (0, 0, 0, 0)


@leasing_kinds
async def test_an_unread_slot_comes_back_when_its_lease_ends(
    case: Case, peer: Peer, make_inbox: MakeInbox
) -> None:
    pair = await connect(peer, make_inbox, case, lease_seconds=1.0)
    await pair.publish(1)
    assert (await pair.stats()).leased == 1
    stats = await pair.settle()
    assert (stats.used_bytes, stats.expired, stats.released) == (0, 1, 0)


@leasing_kinds
async def test_a_late_reader_never_gets_another_images_rows(
    case: Case, peer: Peer, make_inbox: MakeInbox
) -> None:
    pair = await connect(peer, make_inbox, case)
    stale = await pair.publish(1)
    await pair.expire()
    fresh = await pair.publish(2)
    assert fresh.offset == stale.offset
    with pytest.raises(LeaseExpired):
        await pair.inbox.fetch(stale)
    assert same_bits(await pair.inbox.fetch(fresh), sample(2, 20))


@leasing_kinds
async def test_a_lease_that_ends_during_the_copy_spoils_it(
    case: Case, peer: Peer, make_inbox: MakeInbox
) -> None:
    pair = await connect(peer, make_inbox, case)
    handle = await pair.publish(1)
    slab = pair.inbox._slab(handle)
    await slab.fetch(handle, lambda shape, dtype: torch.empty(shape, dtype=dtype))
    await pair.expire()
    await pair.publish(2)
    assert await slab.release(handle) is False


@leasing_kinds
async def test_a_stale_release_does_not_end_the_next_lease(
    case: Case, peer: Peer, make_inbox: MakeInbox
) -> None:
    pair = await connect(peer, make_inbox, case)
    stale = await pair.publish(1)
    slab = pair.inbox._slab(stale)
    await pair.expire()
    fresh = await pair.publish(2)
    assert await slab.release(stale) is False
    slab.abandon(stale)
    await asyncio.sleep(0.02)
    assert (await pair.stats()).leased == 1
    assert same_bits(await pair.inbox.fetch(fresh), sample(2, 20))


@every_kind
async def test_a_second_release_does_no_harm(case: Case, peer: Peer, make_inbox: MakeInbox) -> None:
    pair = await connect(peer, make_inbox, case)
    handle = await pair.publish(1)
    slab = pair.inbox._slab(handle)
    assert await slab.release(handle) is True
    await slab.release(handle)
    stats = await pair.settle()
    assert (stats.used_bytes, stats.expired) == (0, 0)
    assert stats.released == int(case.leases)


@leasing_kinds
async def test_abandoned_rows_free_their_slot(case: Case, peer: Peer, make_inbox: MakeInbox) -> None:
    pair = await connect(peer, make_inbox, case)
    await pair.inbox.fetch(await pair.publish(1))
    pair.inbox.discard(await pair.publish(2))
    stats = await pair.settle()
    assert (stats.used_bytes, stats.expired, stats.released) == (0, 0, 2)


@leasing_kinds
async def test_a_full_slab_makes_the_producer_wait_and_then_refuse(
    case: Case, peer: Peer, make_inbox: MakeInbox
) -> None:
    pair = await connect(peer, make_inbox, case)
    first = await pair.publish(1, 8 * BLOCK_ROWS)
    with pytest.raises(Overloaded, match="full"):
        await pair.publish(2, 1, timeout=0.05)
    waiting = asyncio.ensure_future(pair.publish(3, 1, timeout=60.0))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert same_bits(await pair.inbox.fetch(first), sample(1, 8 * BLOCK_ROWS))
    assert same_bits(await pair.inbox.fetch(await waiting), sample(3, 1))


def _tampered(handle: Handle) -> list[tuple[str, Handle]]:
    rows, row_width = handle.shape
    changes: dict[str, Any] = {
        "kind": "carrier-pigeon",
        "producer": "encoder-9",
        "slab": "0" * 32,
        "offset=-block": -BLOCK_ROWS * ROW_WIDTH * 4,
        "offset=4": handle.offset + 4,
        "offset=end": 8 * BLOCK_ROWS * ROW_WIDTH * 4,
        "offset=huge": 2**62,
        "shape=rows+1024": (rows + 1024, row_width),
        "shape=row_width+1": (rows, row_width + 1),
        "shape=row_width/2": (rows, row_width // 2),
        "shape=0": (0, row_width),
        "shape=negative": (-rows, -row_width),
        "shape=huge": (2**40, row_width),
        "shape=3d": (rows, row_width, 1),
        "dtype": "float64",
        "dtype=other": "float16",
        "lease=0": 0,
        "lease=-1": -1,
        "lease=2**64": 2**64,
        "data": handle.data + b"x",
    }
    return [
        (name, msgspec.structs.replace(handle, **{name.partition("=")[0]: value}))
        for name, value in changes.items()
    ]


@every_kind
async def test_a_tampered_handle_is_refused_before_memory_is_touched(
    case: Case, peer: Peer, make_inbox: MakeInbox
) -> None:
    pair = await connect(peer, make_inbox, case)
    handle = await pair.publish(1)
    asked: list[object] = []

    def destination(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        asked.append(shape)
        return torch.zeros(shape, dtype=dtype)

    for name, wrong in _tampered(handle):
        if case.kind == "inline" and name == "producer":
            continue  # an inline handle touches no producer's memory
        with pytest.raises(HandOffError):
            await pair.inbox.fetch(wrong, destination)
        assert not asked, name
    assert same_bits(await pair.inbox.fetch(handle), sample(1, 20))


@every_kind
@pytest.mark.parametrize(
    "into",
    [
        torch.zeros(21, ROW_WIDTH),
        torch.zeros(20, ROW_WIDTH + 1),
        torch.zeros(20, ROW_WIDTH, dtype=torch.float16),
        torch.zeros(ROW_WIDTH, 20).T,
        torch.zeros(20 * ROW_WIDTH),
    ],
    ids=["rows", "row_width", "dtype", "strides", "flat"],
)
async def test_a_destination_of_another_shape_is_refused(
    case: Case, into: torch.Tensor, peer: Peer, make_inbox: MakeInbox
) -> None:
    pair = await connect(peer, make_inbox, case)
    handle = await pair.publish(1)
    with pytest.raises(HandOffError, match="destination"):
        await pair.inbox.fetch(handle, lambda shape, dtype: into)
    assert not into.any()
    # The rows were given up, so that their slot is not leased to nobody.
    assert (await pair.settle()).expired == 0


@leasing_kinds
async def test_an_unknown_slab_is_unavailable(case: Case, peer: Peer, make_inbox: MakeInbox) -> None:
    pair = await connect(peer, make_inbox, case)
    handle = await pair.publish(1)
    pair.inbox.forget("encoder-1")
    with pytest.raises(TransportUnavailable):
        await pair.inbox.fetch(handle)
    pair.inbox.connect("encoder-1", pair.infos)
    assert same_bits(await pair.inbox.fetch(handle), sample(1, 20))


@leasing_kinds
async def test_the_slot_of_a_killed_reader_comes_back(
    case: Case, mortal_peer: Peer, make_outbox: Callable[..., Outbox]
) -> None:
    outbox = make_outbox(transport=case.kind, device=case.device, lease_seconds=2.0)
    reader = await mortal_peer.call("open_inbox", case.kind, "encoder-1", outbox.infos())
    for seed in range(2):
        slot = await outbox.slab.acquire(20, timeout=1)
        slot.rows.copy_(sample(seed, 20))
        handle = await outbox.publish(slot, reader)
        if seed == 0:
            rows = torch.tensor(await mortal_peer.call("fetch", handle))
            assert same_bits(rows, sample(0, 20))
    mortal_peer.kill()
    assert await outbox.slab.drain(timeout=60)
    stats = outbox.slab.stats()
    assert (stats.used_bytes, stats.released, stats.expired) == (0, 1, 1)


@leasing_kinds
async def test_a_killed_writer_is_an_error_or_its_last_rows(
    case: Case, mortal_peer: Peer, make_inbox: MakeInbox
) -> None:
    pair = await connect(mortal_peer, make_inbox, case)
    await pair.inbox.fetch(await pair.publish(1))
    handle = await pair.publish(2)
    mortal_peer.kill()
    try:
        got = await asyncio.wait_for(pair.inbox.fetch(handle), 60)
    except TransportUnavailable:
        with pytest.raises(TransportUnavailable):
            pair.inbox.reader_info("encoder-1")
    else:
        assert same_bits(got, sample(2, 20))
    pair.inbox.forget("encoder-1")


@leasing_kinds
async def test_a_writer_that_was_killed_before_connecting_is_unavailable(
    case: Case, mortal_peer: Peer, make_inbox: MakeInbox
) -> None:
    config = outbox_config(transport=case.kind, device=case.device)
    infos = await mortal_peer.call("open_outbox", config)
    mortal_peer.kill()
    inbox = make_inbox(f"{case.kind},inline")
    inbox.connect("encoder-1", infos)
    assert inbox.reader_info("encoder-1").kinds == ("inline",)


@leasing_kinds
async def test_a_frozen_writer_blocks_nobody_for_long(
    case: Case, mortal_peer: Peer, make_inbox: MakeInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "READ_SECONDS", 2.0)
    config = outbox_config(transport=case.kind, device=case.device)
    infos = await mortal_peer.call("open_outbox", config)
    inbox = make_inbox(case.kind)
    inbox.connect("encoder-1", infos)
    reader = inbox.reader_info("encoder-1")
    handles = [await mortal_peer.call("publish", seed, 20, reader) for seed in range(2)]
    assert same_bits(await inbox.fetch(handles[0]), sample(0, 20))
    freeze(mortal_peer.pid)
    try:
        ticks = 0

        async def heartbeat() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        beating = asyncio.ensure_future(heartbeat())
        try:
            assert same_bits(await inbox.fetch(handles[1]), sample(1, 20))
        except TransportUnavailable:
            # It waited for two seconds, in which the loop had time for others.
            assert ticks > 10
        beating.cancel()
    finally:
        mortal_peer.signal(signal.SIGCONT)


@every_kind
async def test_a_cancelled_fetch_gives_its_slot_back(case: Case, peer: Peer, make_inbox: MakeInbox) -> None:
    pair = await connect(peer, make_inbox, case, capacity_rows=64 * BLOCK_ROWS)
    await pair.inbox.fetch(await pair.publish(0))
    # A task that is cancelled before its first step never sees the handle, so it starts with one turn.
    for turns in range(1, 7):
        handle = await pair.publish(turns, 60 * BLOCK_ROWS)
        task = asyncio.ensure_future(pair.inbox.fetch(handle))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    stats = await pair.settle()
    assert (stats.used_bytes, stats.expired) == (0, 0)
    assert same_bits(await pair.inbox.fetch(await pair.publish(9)), sample(9, 20))


@every_kind
async def test_closing_twice_and_using_what_is_closed(case: Case, peer: Peer, make_inbox: MakeInbox) -> None:
    pair = await connect(peer, make_inbox, case)
    handle = await pair.publish(1)
    await pair.inbox.fetch(await pair.publish(2))
    pair.inbox.close()
    pair.inbox.close()
    with pytest.raises(HandOffError):
        await pair.inbox.fetch(handle)
    await peer.call("close")
    await peer.call("close")


@every_kind
async def test_an_outbox_closes_under_its_views(case: Case, make_outbox: Callable[..., Outbox]) -> None:
    outbox = make_outbox(transport=case.kind, device=case.device)
    slot = await outbox.slab.acquire(20, timeout=1)
    view = slot.rows
    outbox.close()
    outbox.close()
    view.fill_(1)
    assert bool((view == 1).all())
    with pytest.raises(HandOffError):
        await outbox.slab.acquire(1, timeout=1)


@every_kind
async def test_nothing_leaks(case: Case, peer: Peer, make_inbox: MakeInbox) -> None:
    before: list[tuple[int, int]] = []
    earlier = mapped([os.getpid()])
    shared = set()
    for _ in range(4):
        pair = await connect(peer, make_inbox, case)
        await pair.inbox.fetch(await pair.publish(1))
        shared |= mapped([os.getpid(), *(child.pid or 0 for child in multiprocessing.active_children())])
        pair.inbox.close()
        await peer.call("close")
        before.append((len(os.listdir("/proc/self/fd")), await peer.call("open_files")))
    # The first rounds may open what the process keeps, like the devices of a backend.
    assert before[-1] == before[-2] == before[1]
    # The CUDA driver's own files are not ours to judge.
    ours = {file for file in shared - earlier if file.name.startswith(("torch", "tessera", "ucx", "nixl"))}
    assert [file for file in ours if file.exists()] == []
