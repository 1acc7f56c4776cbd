"""Notes the calls of each function of the package, in every interpreter that finds this on its path.

The notes lie in a file that ``record`` made and named in the environment. It is mapped once, so that forked
and confined processes write to it as well: a byte that turns recording on, then for each role and each line
of the package how often the function that begins there was called, and the nanosecond of its first call.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

VARIABLE = "TESSERA_REQUEST_PATH"
ROLES = ("frontend", "embed worker", "encode worker", "worker", "image decoder")
WORD = 8


def lines_of(package: Path) -> dict[str, tuple[int, int]]:
    """Every module below ``package``: the place of its first line among all lines, and how many it has."""
    places: dict[str, tuple[int, int]] = {}
    first = 0
    for path in sorted(package.rglob("*.py")):
        count = path.read_bytes().count(b"\n") + 2
        places[str(path)] = first, count
        first += count
    return places


def _role(argv: list[str]) -> str | None:
    words = " ".join(argv)
    if "tessera.frontend" in argv:
        return "frontend"
    if "tessera.worker" in argv:
        mode = argv[argv.index("--disaggregation-mode") + 1] if "--disaggregation-mode" in argv else "agg"
        return {"embed": "embed worker", "encode": "encode worker"}.get(mode, "worker")
    # What decoders are forked from.
    return "image decoder" if "decoding" in words or "forkserver" in words else None


def _install(notes: str, package: Path, role: str) -> None:
    with open(notes, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    words = memoryview(memory)[WORD:].cast("Q")
    lines = lines_of(package)
    total = sum(count for _, count in lines.values())
    begin = ROLES.index(role) * total
    places = {path: 2 * (begin + first) for path, (first, _) in lines.items()}

    def note(frame: FrameType, event: str, _: object) -> None:
        if not memory[0] or event != "call":
            return
        code = frame.f_code
        first = places.get(code.co_filename)
        if first is not None and code.co_name != "<module>":
            place = first + 2 * code.co_firstlineno
            if not words[place]:
                words[place + 1] = time.monotonic_ns()
            words[place] += 1

    threading.setprofile(note)
    sys.setprofile(note)


if _notes := os.environ.get(VARIABLE):
    _file, _, _package = _notes.partition(os.pathsep)
    if _found := _role(sys.orig_argv):
        _install(_file, Path(_package), _found)
