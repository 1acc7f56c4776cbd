"""What a child's parent asks for, and does not want any more."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from tessera.errors import TesseraError
from tessera.local.child import Child, ChildLost
from tessera.local.content import Content
from tessera.local.messages import AskUsage, Embed, EmbeddedRows, Load, Used
from tessera.local.usage import Usage
from tessera.local.wanted import DEFAULT, Wanted

pytestmark = pytest.mark.service


def fork() -> int:
    """A process with all descriptors of this one."""
    if not (pid := os.fork()):
        time.sleep(60)
        os._exit(0)
    return pid


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


async def test_what_nobody_waits_for_is_cancelled_in_the_child() -> None:
    child = await Child.start("tests.local.waiting_child", Load([], ""))
    try:
        tasks = [
            asyncio.create_task(child.ask(lambda number: Embed(number, [], DEFAULT), EmbeddedRows))
            for _ in range(3)
        ]
        await asyncio.sleep(0)
        assert await child.ask(AskUsage, Used) == Used(3, Usage())
        for task in tasks[:2]:
            task.cancel()
        await asyncio.wait(tasks[:2])
        used = await child.ask(AskUsage, Used)
        assert used.usage.images == 2
    finally:
        await child.close()
    with pytest.raises(ChildLost):
        await tasks[2]


async def test_an_unforeseen_error_is_the_answer_of_its_question_alone() -> None:
    child = await Child.start("tests.local.waiting_child", Load([], ""))
    try:
        with pytest.raises(TesseraError, match="internal error: ZeroDivisionError") as raised:
            await child.ask(lambda number: Embed(number, [], Wanted(query=Content(parts=()))), EmbeddedRows)
        assert raised.value.code == "internal_error"
        assert await child.ask(AskUsage, Used) == Used(1, Usage())
    finally:
        await child.close()


async def test_a_channel_ends_also_where_a_forked_process_has_it() -> None:
    child = await Child.start("tests.local.waiting_child", Load([], ""))
    pid = fork()
    await child.close()
    end(pid)
    # It was not killed after a wait.
    assert child._process.returncode == 0
