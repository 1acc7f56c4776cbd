"""What keeps an event loop from its turns is seen, in its own thread and in another; what does not is not."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.frontend.watched import note, watching

# One call each, of 0.1 to 0.5 s: adding integers up keeps the interpreter, hashing lets it go.
KEEPS: partial[object] = partial(sum, range(10_000_000))
LETS_GO: partial[object] = partial(hashlib.sha256, bytes(128 << 20))


def timed(work: Callable[[], object]) -> float:
    """Return the milliseconds of processor time that work takes in its thread."""
    began = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - began)


@pytest.mark.parametrize(
    ("work", "aside", "seen"),
    [(KEEPS, False, True), (KEEPS, True, True), (LETS_GO, False, True), (LETS_GO, True, False)],
    ids=["on the loop", "keeps it", "on the loop, lets it go", "lets it go"],
)
async def test_a_loop_that_cannot_go_on_is_seen(
    tmp_path: Path, work: Callable[[], object], aside: bool, seen: bool
) -> None:
    note(file := tmp_path / "longest", 0.0)
    with watching(file):
        await asyncio.sleep(0.01)
        took = await asyncio.to_thread(timed, work) if aside else timed(work)
        await asyncio.sleep(0.01)
    assert (float(file.read_text()) > 0.8 * took) == seen
