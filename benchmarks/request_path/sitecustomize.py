"""Notes the first call into each file of the package, in every interpreter that finds this on its path.

The notes lie in a file that ``record`` made and named in the environment. It is mapped once, so that forked
and confined processes write to it as well: a byte that turns recording on, then for each role the nanosecond
of the first call into each file, 0 for none.
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


def package_files(package: Path) -> list[Path]:
    """Every module below ``package``, in the order in which the notes count them."""
    return sorted(package.rglob("*.py"))


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
    files = package_files(package)
    first = ROLES.index(role) * len(files)
    places = {str(path): first + number for number, path in enumerate(files)}

    def note(frame: FrameType, event: str, _: object) -> None:
        if not memory[0] or event != "call":
            return
        code = frame.f_code
        place = places.get(code.co_filename)
        if place is not None and not words[place] and code.co_name != "<module>":
            words[place] = time.monotonic_ns()

    threading.setprofile(note)
    sys.setprofile(note)


if _notes := os.environ.get(VARIABLE):
    _file, _, _package = _notes.partition(os.pathsep)
    if _found := _role(sys.orig_argv):
        _install(_file, Path(_package), _found)
