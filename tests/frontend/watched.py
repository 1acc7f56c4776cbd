"""``python -m tests.frontend.watched FILE FLAGS``: a frontend that notes how long its event loop stands.

That is the processor time of the loop's thread in one turn, which a busy machine makes no longer. The most of
all turns since the file was made stands in it, in milliseconds.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from tessera.frontend import __main__ as frontend

# A turn that takes longer has a look at its end.
_LOOK_SECONDS = 0.001


def main() -> int:
    file, serve = Path(sys.argv.pop(1)), frontend.serve

    async def watched(*arguments: Any) -> None:
        loop, longest, began = asyncio.get_running_loop(), 0.0, time.thread_time()

        def look() -> None:
            nonlocal longest, began
            took = time.thread_time() - began
            if not file.exists():
                longest = 0.0
            elif took > longest:
                longest = took
                # At no moment is it empty.
                new = file.with_suffix(".new")
                new.write_text(f"{1e3 * longest:.1f}")
                new.replace(file)
            began = time.thread_time()
            loop.call_later(_LOOK_SECONDS, look)

        look()
        await serve(*arguments)

    frontend.serve = watched
    return frontend.main()


if __name__ == "__main__":
    sys.exit(main())
