"""How the two sides agree on a kind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
import pytest
import torch
from transport_peer import Peer, outbox_config, same_bits, sample

from tessera.errors import ConfigError, HandOffError, LeaseExpired, TransportUnavailable
from tessera.transport.host import host_id
from tessera.transport.inbox import Inbox
from tessera.transport.kinds.nixl_agent import nixl_missing
from tessera.transport.kinds.select import select_kinds
from tessera.transport.outbox import Outbox
from tessera.transport.settings import TransportSettings
from tessera.transport.slab import slab
from tessera.wire import Handle, ReaderInfo, SlabInfo

needs_nixl = pytest.mark.skipif(nixl_missing() is not None, reason="needs nixl")

MakeInbox = Callable[..., Inbox]
MakeOutbox = Callable[..., Outbox]


async def hand_off(outbox: Outbox, reader: ReaderInfo, seed: int = 1) -> Handle:
    slot = await outbox.slab.acquire(20, timeout=1)
    slot.rows.copy_(sample(seed, 20))
    return await outbox.publish(slot, reader)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "tessera.transport.inbox"]


def unreachable(infos: tuple[SlabInfo, ...], *kinds: str) -> tuple[SlabInfo, ...]:
    return tuple(
        msgspec.structs.replace(info, address=b"\xc0") if info.kind in kinds else info for info in infos
    )


def test_what_a_choice_stands_for() -> None:
    cpu = torch.device("cpu")
    assert select_kinds("auto", slab_device=cpu)[-1] == "inline"
    assert "cuda_ipc" not in select_kinds("auto", slab_device=cpu)
    assert select_kinds("inline, shm") == ("shm", "inline")
    with pytest.raises(ConfigError, match="pigeon"):
        select_kinds("shm,pigeon")
    with pytest.raises(ConfigError, match="cuda_ipc needs"):
        select_kinds("cuda_ipc", slab_device=cpu)


def test_settings_that_make_no_sense(make_outbox: MakeOutbox) -> None:
    for changes in ({"capacity_rows": 17}, {"dtype": torch.int64}):
        with pytest.raises(ValueError, match=r"block_rows|int64"):
            make_outbox(**changes)


async def test_auto_takes_shared_memory_on_one_host(
    peer: Peer, make_inbox: MakeInbox, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    infos = await peer.call("open_outbox", outbox_config(transport="auto"))
    inbox = make_inbox("auto")
    assert inbox.reader_info("encoder-1").kinds == ("inline",)
    inbox.connect("encoder-1", infos)
    for seed in range(3):
        reader = inbox.reader_info("encoder-1")
        assert reader.kinds == ("shm", "inline")
        handle = await peer.call("publish", seed, 20, reader)
        assert same_bits(await inbox.fetch(handle), sample(seed, 20))
    assert inbox.routes() == {"encoder-1": "shm"}
    assert lines(caplog) == ["hand-off from encoder-1 goes by shm"]


@needs_nixl
async def test_auto_takes_nixl_where_memory_cannot_be_shared(
    make_outbox: MakeOutbox, make_inbox: MakeInbox, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    outbox = make_outbox(transport="auto")
    inbox = make_inbox("auto")
    inbox.connect("encoder-1", unreachable(outbox.infos(), "shm"))
    reader = inbox.reader_info("encoder-1")
    assert reader.kinds == ("nixl", "inline")
    handle = await hand_off(outbox, reader)
    assert same_bits(await inbox.fetch(handle), sample(1, 20))
    first, second = lines(caplog)
    assert first.startswith("hand-off from encoder-1 by shm given up: ")
    assert second == "hand-off from encoder-1 goes by nixl"


async def test_auto_ends_with_inline(make_outbox: MakeOutbox, make_inbox: MakeInbox) -> None:
    outbox = make_outbox(transport="auto")
    inbox = make_inbox("auto")
    inbox.connect("encoder-1", unreachable(outbox.infos(), "shm", "nixl"))
    reader = inbox.reader_info("encoder-1")
    assert reader.kinds == ("inline",)
    handle = await hand_off(outbox, reader)
    assert same_bits(await inbox.fetch(handle), sample(1, 20))
    assert outbox.slab.stats().used_bytes == 0


async def test_shared_memory_is_not_offered_across_hosts(make_outbox: MakeOutbox) -> None:
    outbox = make_outbox(transport="shm,inline")
    far = ReaderInfo(host="elsewhere", kinds=("shm", "inline"))
    assert (await hand_off(outbox, far)).kind == "inline"
    with pytest.raises(TransportUnavailable, match="no transport leads to this reader"):
        await hand_off(outbox, ReaderInfo(host="elsewhere", kinds=("shm", "cuda_ipc")))
    # The slot of a failed hand-off still belongs to the caller.
    assert outbox.slab.stats().held == 1
    assert host_id() != "elsewhere"


async def test_a_slab_that_is_let_go_and_reached_again_while_its_rows_are_copied(
    make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab, "CHUNK_BYTES", 1)  # the copy takes a turn of the loop for each row
    outbox = make_outbox(transport="shm")
    inbox = Inbox("reader-1", TransportSettings(kind="shm"))
    inbox.connect("encoder-1", outbox.infos())
    handle = await hand_off(outbox, inbox.reader_info("encoder-1"))
    fetching = asyncio.ensure_future(inbox.fetch(handle))
    await asyncio.sleep(0)
    inbox.forget("encoder-1")
    inbox.connect("encoder-1", outbox.infos())
    assert not fetching.done()
    assert same_bits(await fetching, sample(1, 20))
    assert await outbox.slab.drain(timeout=60)
    inbox.close()


async def test_a_kind_that_failed_is_given_up_and_tried_again_later(
    make_outbox: MakeOutbox, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    outbox = make_outbox(transport="shm,inline")
    inbox = Inbox("reader-1", TransportSettings(kind="shm,inline"))
    inbox.connect("encoder-1", outbox.infos())
    handle = await hand_off(outbox, inbox.reader_info("encoder-1"))
    inbox._let_go("shm", handle.slab)
    with pytest.raises(TransportUnavailable):
        await inbox.fetch(handle)
    assert inbox.reader_info("encoder-1").kinds == ("inline",)
    assert same_bits(await inbox.fetch(await hand_off(outbox, inbox.reader_info("encoder-1"))), sample(1, 20))
    inbox._peers["encoder-1"].failed["shm"] = 0.0
    reader = inbox.reader_info("encoder-1")
    assert reader.kinds == ("shm", "inline")
    await inbox.fetch(await hand_off(outbox, reader))
    assert [line.split(" ", 3)[3] for line in lines(caplog)][1:] == ["goes by inline", "goes by shm"]
    inbox.close()


async def test_without_inline_an_unreachable_producer_is_an_error(
    make_outbox: MakeOutbox, make_inbox: MakeInbox
) -> None:
    outbox = make_outbox(transport="shm")
    inbox = make_inbox("shm")
    with pytest.raises(TransportUnavailable):
        inbox.reader_info("encoder-1")
    inbox.connect("encoder-1", unreachable(outbox.infos(), "shm"))
    with pytest.raises(TransportUnavailable):
        inbox.reader_info("encoder-1")
    inbox.connect("encoder-1", outbox.infos())
    assert inbox.reader_info("encoder-1").kinds == ("shm",)


async def test_a_restarted_producer_replaces_its_slab(make_outbox: MakeOutbox, make_inbox: MakeInbox) -> None:
    old, new = make_outbox(transport="shm"), make_outbox(transport="shm")
    inbox = make_inbox("shm")
    inbox.connect("encoder-1", old.infos())
    inbox.connect("encoder-1", old.infos())
    stale = await hand_off(old, inbox.reader_info("encoder-1"))
    inbox.connect("encoder-1", new.infos())
    with pytest.raises(TransportUnavailable):
        await inbox.fetch(stale)
    # The stale handle says nothing about the new slab.
    handle = await hand_off(new, inbox.reader_info("encoder-1"), seed=2)
    assert same_bits(await inbox.fetch(handle), sample(2, 20))


async def test_a_malformed_announcement_is_unavailable(
    make_outbox: MakeOutbox, make_inbox: MakeInbox
) -> None:
    outbox = make_outbox(transport="auto")
    for changes in ({"nbytes": 1}, {"address": b""}, {"slab": "zz"}):
        inbox = make_inbox("auto")
        inbox.connect("encoder-1", [msgspec.structs.replace(info, **changes) for info in outbox.infos()])
        assert "shm" not in inbox.reader_info("encoder-1").kinds
        assert inbox.reader_info("encoder-1").kinds[-1] == "inline"


async def test_an_expired_handle_does_not_end_the_route(
    make_outbox: MakeOutbox, make_inbox: MakeInbox
) -> None:
    outbox = make_outbox(transport="shm", lease_seconds=0.01)
    inbox = make_inbox("shm")
    inbox.connect("encoder-1", outbox.infos())
    handle = await hand_off(outbox, inbox.reader_info("encoder-1"))
    assert await outbox.slab.drain(timeout=60)
    with pytest.raises(LeaseExpired):
        await inbox.fetch(handle)
    assert inbox.reader_info("encoder-1").kinds == ("shm",)


async def test_auto_does_without_a_backend_that_cannot_start(
    make_outbox: MakeOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise TransportUnavailable("no such device")

    monkeypatch.setattr("tessera.transport.kinds.nixl.NixlAgent", refuse)
    outbox = make_outbox(transport="auto")
    assert outbox.kinds == ("shm", "inline")
    if nixl_missing() is None:
        with pytest.raises(TransportUnavailable):
            make_outbox(transport="nixl")


@pytest.mark.parametrize("kind", ["shm", "inline"])
async def test_a_checksum_proves_the_rows(make_outbox: MakeOutbox, make_inbox: MakeInbox, kind: str) -> None:
    outbox, inbox = make_outbox(checksum=True, transport=kind), make_inbox(transport=kind)
    inbox.connect("encoder-1", outbox.infos())
    handle = await hand_off(outbox, inbox.reader_info("encoder-1"))
    assert len(handle.checksum) == 16
    assert same_bits(await inbox.fetch(handle), sample(1, 20))
    # Another image's rows at the place that a handle names, as if the lease had not been looked at.
    other = await hand_off(outbox, inbox.reader_info("encoder-1"), seed=2)
    forged = msgspec.structs.replace(other, checksum=handle.checksum)
    with pytest.raises(HandOffError, match="not what was published"):
        await inbox.fetch(forged)
    assert outbox.slab.stats().held == 0


async def test_without_a_checksum_nothing_is_compared(make_outbox: MakeOutbox, make_inbox: MakeInbox) -> None:
    outbox, inbox = make_outbox(transport="inline"), make_inbox(transport="inline")
    handle = await hand_off(outbox, ReaderInfo(host=host_id(), kinds=("inline",)))
    assert handle.checksum == b""
    assert same_bits(await inbox.fetch(handle), sample(1, 20))
