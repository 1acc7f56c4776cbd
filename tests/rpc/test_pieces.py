"""Long replies: cut into pieces, put together again, beside short ones."""

from __future__ import annotations

import asyncio
import random

import pytest

from tessera import wire
from tessera.errors import ProtocolError, Unavailable
from tessera.rpc.pieces import PIECE_BYTES, Cut, Joined
from tests.rpc.conftest import Deployment, echo, echoed
from tests.waiting import until

MIB = 1 << 20


def replies(size: int, position: int = 0) -> wire.Replies:
    return wire.Replies(replies={position: echoed(echo(size))})


def decoded(payload: bytes) -> wire.Piece:
    piece = wire.decode_replies(payload)
    assert isinstance(piece, wire.Piece)
    return piece


def test_payloads_come_together_however_their_pieces_are_mixed() -> None:
    sent = [replies(size, position) for position, size in enumerate((5 * MIB, 4 * PIECE_BYTES, 11 * MIB))]
    cut = [Cut(number, wire.encode(payload)) for number, payload in enumerate(sent)]
    joined, found = Joined(3), []
    chance = random.Random(1)
    while under_way := [one for one in cut if one.left]:
        payload = chance.choice(under_way).next()
        assert len(payload) <= PIECE_BYTES + 100
        if whole := joined.add(decoded(payload)):
            found.append(whole)
    assert sorted(found, key=lambda whole: min(whole.replies)) == sent


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, 10, 11)],
        [(0, 10, 6), (0, 10, 5)],
        [(0, 10, 0)],
        [(0, 10, 6), (0, 11, 4)],
        [(0, 10, 6), (1, 10, 6), (2, 10, 6)],
        [(0, (256 << 20) + 1, 5)],
        [(0, -1, 5)],
        [(0, 10, 10)],
    ],
    ids=["over", "over later", "empty", "another size", "too many", "too long", "below zero", "no message"],
)
def test_pieces_that_fit_nothing_are_refused(pieces: list[tuple[int, int, int]]) -> None:
    joined = Joined(2)
    with pytest.raises(ProtocolError):
        for payload, nbytes, size in pieces:
            made = wire.Piece(payload=payload, nbytes=nbytes, data=memoryview(bytes(size)))
            assert joined.add(made) is None


def test_a_piece_is_of_no_piece() -> None:
    inner = wire.encode(wire.Piece(payload=0, nbytes=5, data=memoryview(bytes(5))))
    with pytest.raises(ProtocolError, match="within"):
        Joined(1).add(wire.Piece(payload=0, nbytes=len(inner), data=memoryview(inner)))


async def test_a_short_reply_passes_between_the_pieces_of_long_ones(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It becomes ready when the first piece is written; the shorter one of the long ones goes on first."""
    began = asyncio.Event()
    written: list[str] = []
    sizes = {"longest": 40 * MIB, "long": 10 * MIB, "short": 1}
    encode, cut = wire.encode, Cut.next

    def writing(message: wire.Message) -> bytes:
        if isinstance(message, wire.Replies):
            written.append("replies")
        return encode(message)

    def piece(self: Cut) -> bytes:
        began.set()
        written.append(f"piece {len(self._payload) // MIB}")
        # A server that stops waits for it.
        assert server.in_flight >= 1
        return cut(self)

    async def handle(message: wire.Request) -> wire.Reply:
        assert isinstance(message, wire.EmbedRequest)
        name = message.items[0].param
        if name == "short":
            await began.wait()
        return echoed(echo(sizes[name]))

    server = await deployment.serve(handle)
    client = await deployment.client()
    monkeypatch.setattr(wire, "encode", writing)
    monkeypatch.setattr(Cut, "next", piece)
    order: list[str] = []

    async def call(name: str) -> None:
        reply = await client.call(server.instance, echo(param=name), timeout=60)
        assert isinstance(reply, wire.EmbedReply) and len(reply.outputs[0].rows) == sizes[name]
        order.append(name)

    await asyncio.gather(*(call(name) for name in sizes))
    assert order == ["short", "long", "longest"]
    await until(lambda: server.in_flight == 0)
    # The two long ones are encoded first. Ready at the first piece, the short one waits for few more.
    assert written[:3] == ["replies", "replies", "piece 10"]
    assert written.index("replies", 2) < 6 and written[-21:] == ["piece 40"] * 21


async def test_a_reply_that_breaks_off_can_be_asked_for_again(deployment: Deployment) -> None:
    process = await deployment.spawn("broken")
    assert process.stdout is not None
    client = await deployment.client()
    await until(client.instances)
    (instance,) = client.instances()
    # A short one goes through.
    await client.call(instance, echo(), timeout=60)
    with pytest.raises(Unavailable):
        await client.call(instance, echo(20 * MIB), timeout=60)
    assert await process.wait() == -9
    assert client.under_way == 0
