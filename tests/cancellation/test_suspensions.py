"""A caller that leaves takes nothing along: tasks ended at every suspension, and everything is given back."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tessera.rpc.client import _Channel
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.llama_nemotron_vl import COLEMBED_TINY, TINY
from tessera_tools.random_checkpoint.llama_rerank import TINY as RERANK_TINY
from tessera_tools.random_checkpoint.spec import Spec
from tests.cancellation import suspensions
from tests.cancellation.calls import (
    Infer,
    Post,
    image,
    infer,
    pairs,
    pictures,
    remote,
    same_image,
    text,
    texts,
)
from tests.cancellation.deployment import in_process
from tests.cancellation.holdings import Holdings
from tests.cancellation.steps import TaskSteps
from tests.cancellation.suspensions import Call, LeftBehind, end_everywhere
from tests.e2e.service import MODEL
from tests.rpc.conftest import store
from tests.waiting import until

__all__ = ["store"]

Calls = Mapping[str, Callable[[], Call]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of small tiles: each call goes the same way, and tiles of 512 pixels took half of the time."""
    path = tmp_path_factory.mktemp("small") / MODEL
    write_checkpoint(path, replace(TINY, image_size=64), seed=0)
    return path


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest keeps what is logged, and with a traceback everything in its frames."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)


async def end_all(calls: Calls, reached: Collection[str] = ()) -> None:
    """Each call's tasks ended everywhere, until that was in all of ``reached``; raises ``LeftBehind``."""
    for make in calls.values():
        await make().ask()
    holdings, steps = Holdings(), TaskSteps()
    asyncio.get_running_loop().set_task_factory(steps)

    async def ended() -> bool:
        for name, make in calls.items():
            began = time.monotonic()
            count = await end_everywhere(steps, holdings, name, make)
            print(f"{name}: ended {count} times in {time.monotonic() - began:.1f} s")
        return steps.visited.keys() >= set(reached)

    try:
        # A read by NIXL may be over before anybody looks, and then nothing waits for it.
        await until(ended, said=lambda: dict(steps.visited))
    finally:
        asyncio.get_running_loop().set_task_factory(None)
    print(f"{holdings.compared} counts compared; suspensions by module and function: {dict(steps.visited)}")


@pytest.mark.leaves
@pytest.mark.parametrize(
    ("roles", "transport"),
    [
        (("agg",), "auto"),
        (("encode", "embed"), "shm"),
        (("encode", "embed"), "nixl"),
    ],
    ids=["agg", "shm", "nixl"],
)
async def test_nothing_is_left_behind(
    checkpoint: Path,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    roles: tuple[str, ...],
    transport: str,
) -> None:
    reached = {"tessera.rpc", "tessera.frontend.serving", "tessera.worker", "SingleFlight.run"}
    if roles == ("agg",):
        reached |= {"tessera.frontend.media", "tessera_kserve.inference", "tessera.frontend.http"}
    elif transport == "nixl":
        # The others wait for nothing.
        reached.add("tessera.transport")
    # Within one machine UCX may copy at once, and then nothing waits.
    monkeypatch.setenv("UCX_TLS", "tcp")
    with pictures() as host:
        async with in_process(checkpoint, tmp_path, roles=roles, transport=transport) as at:
            calls: dict[str, Callable[[], Call]] = {
                "image": lambda: Post(at, "/v1/embeddings", image),
                "one image twice": lambda: Post(at, "/v1/embeddings", same_image),
                "text": lambda: Post(at, "/v1/embeddings", text),
                "texts in chunks": lambda: Post(at, "/v1/embeddings", texts, chunked=True),
                "images of a host": lambda: Post(at, "/v1/embeddings", lambda: remote(host)),
                "KServe": lambda: Post(at, f"/v2/models/{MODEL}/infer", infer),
                "gRPC": lambda: Infer(at),
                "stream by gRPC": lambda: Infer(at, calls=3, stream=True),
            }
            # One is enough for how rows travel: of these two calls with NIXL, 450 were ended.
            if roles != ("agg",):
                name = "image" if transport == "nixl" else "one image twice"
                calls = {name: calls[name]}
            await end_all(calls, reached)


@pytest.mark.leaves
@pytest.mark.parametrize(
    ("spec", "path", "body"),
    [(RERANK_TINY, "/v1/rerank", pairs), (COLEMBED_TINY, "/pooling", text)],
    ids=["rerank", "token vectors"],
)
async def test_other_outputs_leave_nothing_behind(
    store: Path, tmp_path: Path, spec: Spec, path: str, body: Callable[[], dict[str, Any]]
) -> None:
    write_checkpoint(tmp_path / "model", spec, seed=0)
    async with in_process(tmp_path / "model", tmp_path) as at:
        await end_all({path: lambda: Post(at, path, body)})


async def test_a_count_that_a_task_gives_back_itself_is_found(
    checkpoint: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that is cancelled before its first step runs none of its own ``finally``."""
    travel, ended = _Channel._travel, _Channel._ended

    @functools.wraps(travel)
    async def travel_and_end(self: _Channel, *arguments: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            await travel(self, *arguments)
        finally:
            ended(self, arguments[0], task)

    monkeypatch.setattr(_Channel, "_travel", travel_and_end)
    monkeypatch.setattr(_Channel, "_ended", lambda *_: None)
    monkeypatch.setattr(suspensions, "_SETTLE_SECONDS", 1.0)
    async with in_process(checkpoint, tmp_path) as at:
        with pytest.raises(LeftBehind, match="_starting"):
            await end_all({"text": lambda: Post(at, "/v1/embeddings", text)})


async def test_a_socket_that_every_departure_leaves_is_found(
    checkpoint: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[socket.socket] = []

    class Leaving(Post):
        def hang_up(self, _: object = None) -> None:
            left.append(socket.socket())
            super().hang_up()

    monkeypatch.setattr(suspensions, "_SOCKET_SECONDS", 0.5)
    async with in_process(checkpoint, tmp_path) as at:
        with pytest.raises(LeftBehind, match="4 times: more sockets"):
            await end_all({"text": lambda: Leaving(at, "/v1/embeddings", text)})
    for one in left:
        one.close()
