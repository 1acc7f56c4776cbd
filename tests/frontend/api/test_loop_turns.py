"""However much work is ready at once, the network is looked at in between."""

from __future__ import annotations

import asyncio
import socket
from functools import partial

import pytest

from tessera.frontend.api.endpoint import LoopTurns


async def test_whoever_comes_meanwhile_does_not_wait_for_all_of_it() -> None:
    turns, happened = LoopTurns(), []

    def work(number: int) -> None:
        happened.append(number)
        if number == 3:
            there.send(b"x")

    async def listen() -> None:
        await asyncio.get_running_loop().sock_recv(here, 1)
        happened.append(-1)

    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        await asyncio.gather(listen(), *(turns.run(partial(work, number)) for number in range(100)))
    assert [number for number in happened if number >= 0] == list(range(100))
    # The rest of the round that sent it, the one whose turns were given before the network was looked at,
    # and the one given while it was: of eight each.
    assert 4 <= happened.index(-1) <= 4 + 7 + 8 + 8


async def test_another_client_does_not_wait_for_all_of_one() -> None:
    turns, happened = LoopTurns(), []
    flood = [asyncio.ensure_future(turns.run(partial(happened.append, "alice"), "alice")) for _ in range(600)]
    await asyncio.sleep(0)
    await turns.run(partial(happened.append, "bob"), "bob")
    await asyncio.gather(*flood)
    # Those that had begun in this round, and one of hers before him.
    assert happened.index("bob") <= 8 + 1
    assert len(happened) == 601


async def test_a_turn_that_fails_or_is_given_up_is_over() -> None:
    turns, done = LoopTurns(), []

    def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await turns.run(fail)
    tasks = [asyncio.ensure_future(turns.run(partial(done.append, number))) for number in range(20)]
    await asyncio.sleep(0)
    # One whose turn has been given may be given up as well.
    for number in (9, 10, 19):
        tasks[number].cancel()
    await asyncio.wait(tasks, timeout=60)
    assert done == [number for number in range(20) if number not in (9, 10, 19)]
