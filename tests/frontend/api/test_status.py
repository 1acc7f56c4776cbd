"""The state of the workers, asked over the real runtime."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

import tessera
from tessera import wire
from tessera.checkpoint.origin import origin
from tessera.errors import ProtocolError
from tessera.frontend.api.status import Shown, StatusBoard
from tessera.frontend.metrics import FrontendMetrics
from tessera.rpc import Client, Peers
from tests.rpc.conftest import INFO, Deployment, deployment, store
from tests.waiting import until

__all__ = ["deployment", "store"]

Board = Callable[..., Awaitable[StatusBoard]]
STATE = wire.WorkerState(
    queued={"text": 7.0},
    cache=wire.CacheState(hits=2, misses=1, entries=1, nbytes=64, capacity_bytes=128),
)


@pytest.fixture
async def board(deployment: Deployment) -> AsyncIterator[Board]:
    opened: list[Peers] = []

    async def make(workers: int) -> StatusBoard:
        embed = Peers(await deployment.client(), lambda _: None)
        nobody = f"dyn://{deployment.namespace}.encode.generate"
        encode = Peers(await Client.connect(deployment.runtime(), nobody), lambda _: None)
        opened.extend((embed, encode))
        await until(lambda: len(embed.ready) == workers)
        shown = Shown(head={"model": "m"}, embed=embed, encode=encode)
        return StatusBoard(lambda: [shown], dict, FrontendMetrics(), lambda: 0)

    yield make
    for peers in opened:
        await peers.close()


async def test_many_viewers_are_one_question(deployment: Deployment, board: Board) -> None:
    asked = 0

    async def answer(request: wire.Request) -> wire.Reply:
        nonlocal asked
        if isinstance(request, wire.Inspect):
            asked += 1
            return STATE
        return INFO

    server = await deployment.serve(answer)
    made = await board(1)
    views = [asyncio.ensure_future(made.read()) for _ in range(20)]
    await asyncio.sleep(0)
    views[0].cancel()
    shown = await asyncio.gather(*views[1:])
    assert asked == 1
    assert all(view == shown[0] for view in shown)
    assert shown[0]["model"] == "m"
    assert shown[0]["workers"] == [
        {
            "instance": f"{server.instance:x}",
            "role": "embed",
            "dtype": "float32",
            "rounding": "",
            "state": {
                "queued": {"text": 7.0},
                "cache": {"hits": 2, "misses": 1, "entries": 1, "nbytes": 64, "capacity_bytes": 128},
                "slab": None,
            },
        }
    ]


async def test_a_worker_that_does_not_answer_is_listed_without_numbers(
    deployment: Deployment, board: Board
) -> None:
    async def silent(request: wire.Request) -> wire.Reply:
        if isinstance(request, wire.Inspect):
            await asyncio.sleep(30)
        return INFO

    async def earlier(request: wire.Request) -> wire.Reply:
        if isinstance(request, wire.Inspect):
            raise ProtocolError("malformed request")
        return INFO

    await deployment.serve(silent)
    await deployment.serve(earlier)
    shown = await (await board(2)).read()
    assert [worker["state"] for worker in shown["workers"]] == [None, None]


@pytest.mark.parametrize(
    ("mark", "expected"), [("demo", "demo"), ("random", "random"), ("mine", None), (7, None), (None, None)]
)
def test_a_checkpoint_says_whether_it_is_for_use(tmp_path: Path, mark: object, expected: str | None) -> None:
    config = {"model_type": "any"} | ({"tessera_checkpoint": mark} if mark is not None else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert origin(tmp_path) == expected


def test_the_checkpoints_that_come_along_are_told(checkpoint: Path) -> None:
    assert origin(checkpoint) == "random"
    assert origin(Path(tessera.__file__).parent / "checkpoints" / "tessera-demo") == "demo"
