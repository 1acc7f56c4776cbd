"""What another key feels of a flood: how long its requests take, less what the machine itself takes.

On a machine that others use a request waits for processors that they have. The frontend's loop, the threads
of its workers and this process say how long they were ready and had none, by proc(5). Of that counts as the
machine's the share that processes outside of this test had of all processors meanwhile: none on a quiet one.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from benchmarks.proc import below

from tests.e2e.disaggregated import Disaggregated
from tests.e2e.floods import Asker
from tests.proc import command_line

MOST_SECONDS = 1.0
"""Of another key's request, whatever floods."""
_ASKS = 30
_TRIES = 3
# Beyond what is tokenised on the loop.
LONG = "word " * 1200


def frontend_pid(url: str) -> int:
    """The process, of those that this one has started, that answers there."""
    port = str(urlsplit(url).port)
    return next(
        pid for pid in below(os.getpid()) if {"tessera.frontend", "--port", port}.issubset(command_line(pid))
    )


def resident_bytes(pid: int) -> int:
    """What the process has in memory now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Felt:
    """Asks ``service`` with a key through the frontend that ``bob`` asks."""

    service: Disaggregated
    bob: Asker

    async def answers(self, *images: str) -> None:
        """Ask 30 times each for a short and a long text, and an image if there are any; none takes a second.

        What the service takes it takes each time, so that up to three such rounds are tried.
        """
        slowest = []
        for _ in range(_TRIES):
            slowest.append(await self._round(images))
            if slowest[-1] < MOST_SECONDS:
                return
        raise AssertionError(f"the slowest answers to another key took {slowest} s")

    async def _round(self, images: tuple[str, ...]) -> float:
        """Return the seconds of the slowest answer."""
        asks = [lambda: self._embed("a short text"), lambda: self._embed(LONG)]
        if images:
            asks.append(lambda: self.bob.images(images[0]))
        all_before, own_before = _busy_seconds(), _own_seconds()
        taken = [pair for pairs in await asyncio.gather(*map(self._asked, asks)) for pair in pairs]
        had, own = _busy_seconds() - all_before, _own_seconds() - own_before
        others = max(0.0, 1.0 - own / had)
        return max(seconds - others * waited for seconds, waited in taken)

    async def _embed(self, text: str) -> httpx.Response:
        return await self.bob.embed(text, truncate_prompt_tokens=64)

    async def _asked(self, ask: Callable[[], Awaitable[httpx.Response]]) -> list[tuple[float, float]]:
        """Return the seconds of each answer, and those in which a thread waited for a processor."""
        threads, taken = self._threads(), []
        for _ in range(_ASKS):
            began, waited = time.monotonic(), _waited_seconds(threads)
            answer = await ask()
            taken.append((time.monotonic() - began, _waited_seconds(threads) - waited))
            assert answer.status_code == 200, answer.text
        return taken

    def _threads(self) -> list[Path]:
        """The frontend's loop, not its other threads, which are at the flood; workers and this process."""
        workers = [pid for pid in self.service.running.pids() if "tessera.worker" in command_line(pid)]
        loops = [Path("/proc", str(pid)) for pid in (frontend_pid(self.bob.url), os.getpid())]
        return loops + [task for pid in workers for task in Path(f"/proc/{pid}/task").iterdir()]


def _waited_seconds(threads: Iterable[Path]) -> float:
    nanoseconds = 0
    for thread in threads:
        with suppress(OSError):
            nanoseconds += int((thread / "schedstat").read_bytes().split()[1])
    return nanoseconds / 1e9


def _busy_seconds() -> float:
    """Of all processors, by all processes and the system."""
    user, nice, system, _, _, *interrupts = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    return sum(map(int, (user, nice, system, *interrupts))) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Of a processor by this process and all below it, those that they have collected included."""
    ticks = 0
    for pid in (os.getpid(), *below(os.getpid())):
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
