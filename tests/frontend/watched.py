"""``python -m tests.frontend.watched FILE FLAGS``: a frontend that notes how long its event loop stands.

That is the time of one turn: for as long as the loop's own thread works, and for as long as another thread of
the process keeps the interpreter from it. A turn's time on the clock, less what the thread waited for a
processor, and no more than the processor time of the whole process meanwhile: a busy machine makes neither
longer. The file has the most of all turns, in milliseconds, where that is more than what stood in it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# A turn that takes longer has a look at its end.
_LOOK_SECONDS = 0.001


def note(file: Path, milliseconds: float) -> None:
    """Write the longest turn so far; at no moment is the file empty."""
    new = file.with_suffix(".new")
    new.write_text(f"{milliseconds:.1f}")
    new.replace(file)


@contextmanager
def watching(file: Path) -> Iterator[None]:
    """Look at the turns of the running event loop."""
    loop = asyncio.get_running_loop()
    # Of this thread, by proc(5): the second is how long it was ready and had no processor, in nanoseconds.
    with Path("/proc/thread-self/schedstat").open("rb", buffering=0) as schedule:

        def clocks() -> tuple[float, float]:
            schedule.seek(0)
            waited = int(schedule.read().split()[1]) / 1e9
            return time.monotonic() - waited, time.process_time()

        def look() -> None:
            nonlocal before, timer
            stood = 1e3 * min(now - then for now, then in zip(clocks(), before, strict=True))
            if file.exists() and stood > float(file.read_text()):
                note(file, stood)
            before = clocks()
            timer = loop.call_later(_LOOK_SECONDS, look)

        before = clocks()
        timer = loop.call_later(_LOOK_SECONDS, look)
        try:
            yield
        finally:
            timer.cancel()


def main() -> int:
    from tessera.frontend import __main__ as frontend

    file, serve = Path(sys.argv.pop(1)), frontend.serve

    async def watched(*arguments: Any) -> None:
        with watching(file):
            await serve(*arguments)

    frontend.serve = watched
    return frontend.main()


if __name__ == "__main__":
    sys.exit(main())
