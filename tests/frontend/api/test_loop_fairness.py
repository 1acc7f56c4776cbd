"""However much work is ready at once, the network is looked at in between."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tessera.frontend.api.endpoint import LoopFairness


async def test_whoever_comes_meanwhile_does_not_wait_for_all_of_it() -> None:
    fairness, happened = LoopFairness(), []

    async def work(number: int) -> None:
        async with fairness:
            happened.append(number)
            if number == 3:
                there.send(b"x")

    async def listen() -> None:
        await asyncio.get_running_loop().sock_recv(here, 1)
        happened.append(-1)

    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        await asyncio.gather(listen(), *(work(number) for number in range(100)))
    assert [number for number in happened if number >= 0] == list(range(100))
    # The rest of the round that sent it, the one whose turns were given before the network was looked at,
    # and the one given while it was: of eight each.
    assert 4 <= happened.index(-1) <= 4 + 7 + 8 + 8


async def test_a_turn_that_fails_or_is_given_up_is_over() -> None:
    fairness = LoopFairness()
    with pytest.raises(ValueError, match="broken"):
        async with fairness:
            raise ValueError("broken")

    async def take() -> None:
        async with fairness:
            pass

    async with fairness:
        waiting = [asyncio.ensure_future(take()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
    await asyncio.wait(waiting, timeout=10)
    assert waiting[0].cancelled() and waiting[1].done() and waiting[2].done()
