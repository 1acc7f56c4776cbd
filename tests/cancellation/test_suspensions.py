"""A caller that leaves takes nothing along: tasks ended at every suspension, and everything is given back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cancellation.calls import Post, image, infer, same_image, text, texts
from tests.cancellation.deployment import InProcess, in_process
from tests.cancellation.holdings import Holdings
from tests.cancellation.steps import TaskSteps
from tests.cancellation.suspensions import Call, end_everywhere
from tests.e2e.service import MODEL
from tests.rpc.conftest import store

__all__ = ["store"]


def calls(at: InProcess) -> dict[str, Callable[[], Call]]:
    return {
        "text": lambda: Post(at, "/v1/embeddings", text),
        "texts": lambda: Post(at, "/v1/embeddings", texts, chunked=True),
        "image": lambda: Post(at, "/v1/embeddings", image),
        "same image": lambda: Post(at, "/v1/embeddings", same_image),
        "KServe": lambda: Post(at, f"/v2/models/{MODEL}/infer", infer),
    }


@pytest.mark.parametrize(
    ("roles", "transport"),
    [(("agg",), "auto"), (("encode", "embed"), "shm"), (("encode", "embed"), "inline")],
)
async def test_nothing_is_left_behind(
    checkpoint: Path,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    roles: tuple[str, ...],
    transport: str,
) -> None:
    steps = TaskSteps()
    # pytest keeps what is logged, and with a traceback everything in its frames.
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    async with in_process(checkpoint, tmp_path, roles=roles, transport=transport) as at:
        making = calls(at)
        for make in making.values():
            await make().ask()
        holdings = Holdings()
        asyncio.get_running_loop().set_task_factory(steps)
        for name, make in making.items():
            began = time.monotonic()
            ended = await end_everywhere(steps, holdings, name, make)
            print(f"{name}: ended at {ended} suspensions in {time.monotonic() - began:.1f} s")
        asyncio.get_running_loop().set_task_factory(None)
        print(f"{holdings.compared} counts compared")
    print(dict(steps.visited))
