"""``python -m tests.tessera_corpus.output.killed DIR FORMAT``: runs killed at each call that changes files.

Below DIR are made two outputs for each such call. Both hold an earlier run's vectors; then a run over the
changed corpus is killed (SIGKILL), before that call in one and after it in the other. Prints their number.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tessera_corpus.output.made import embedded, fill, opened

BEFORE = {f"file-{number}.txt": f"text {number}" for number in range(25)}
BEFORE |= {f"list#{number}": f"input {number}" for number in (1, 3)}
# Some rows of two parts, all rows of the third, and what is new.
AFTER = (
    BEFORE
    | {f"file-{number}.txt": f"changed {number}" for number in (1, 2, 12, 20, 21, 22, 23, 24)}
    | {f"new-{number}.txt": f"new {number}" for number in range(4)}
    | {f"list#{number}": f"input {number}" for number in range(5)}
)

CALLS = ("fsync", "rename", "unlink", "mkdir", "open")


def main(out: Path, format: str) -> int:
    fill(opened(out / "before", part_rows=10, format=format), BEFORE.items())
    made = 0
    for after in (False, True):
        for step in range(1, 1000):
            place = out / f"{step}-{'after' if after else 'before'}"
            shutil.copytree(out / "before", place)
            if (child := os.fork()) == 0:
                kill_at(step, after)
                fill(opened(place, part_rows=3, format=format), AFTER.items())
                os._exit(0)
            _, status = os.waitpid(child, 0)
            if status == 0:
                shutil.rmtree(place)
                break
            assert os.WTERMSIG(status) == signal.SIGKILL, status
            made += 1
    print(made)
    return 0


def kill_at(step: int, after: bool) -> None:
    """Have this process killed at the ``step``-th of the calls."""
    left = [step]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def one(*args: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return call(*args, **named)
            finally:
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        return one

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def run_slowly(out: Path, format: str) -> None:
    """Go on with a run of ``AFTER``, a part for every row, and say when it is under way."""
    output = opened(out, part_rows=1, format=format)
    print("started", flush=True)
    for id, text in AFTER.items():
        if not output.done(id, embedded(id, text).content_hash):
            output.put([embedded(id, text)])
    output.close()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
