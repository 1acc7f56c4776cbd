"""Whoever leaves takes nothing along: every task of a call ended at every suspension, everything given back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cancellation.calls import Infer, Post, image, same_image, text, texts
from tests.cancellation.deployment import InProcess, in_process
from tests.cancellation.steps import TaskSteps
from tests.cancellation.suspensions import Call, end_everywhere
from tests.rpc.conftest import store

__all__ = ["store"]


def calls(at: InProcess) -> dict[str, Callable[[], Call]]:
    return {
        "text": lambda: Post(at, "/v1/embeddings", text),
        "texts": lambda: Post(at, "/v1/embeddings", texts, chunked=True),
        "image": lambda: Post(at, "/v1/embeddings", image),
        "same image": lambda: Post(at, "/v1/embeddings", same_image),
        "gRPC": lambda: Infer(at),
        "gRPC stream": lambda: Infer(at, calls=3, stream=True),
    }


@pytest.mark.parametrize(
    ("roles", "transport"), [(("agg",), "auto"), (("encode", "embed"), "shm"), (("encode", "embed"), "inline")]
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
        asyncio.get_running_loop().set_task_factory(steps)
        for name, make in calls(at).items():
            ended = await end_everywhere(steps, name, make)
            print(f"{name}: ended at {ended} suspensions")
        asyncio.get_running_loop().set_task_factory(None)
    print(dict(steps.visited))
