"""Counts of the bytecodes of Python that a frontend runs, by function: alike for the same work anywhere."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from types import CodeType, FrameType
from typing import Any, Final

VARIABLE: Final = "TESSERA_BENCHMARK_BYTECODES"
"""Names the file of a frontend's counts, which it writes, and begins anew, at each SIGUSR2."""


def begin() -> None:
    """Count in this process from now on, if it is a frontend that is asked to."""
    file = os.environ.get(VARIABLE)
    if not file or "tessera.frontend" not in sys.orig_argv:
        return
    # By identity: the hash of a code is that of all that is in it.
    counts: dict[int, list[int]] = {}
    codes: dict[int, CodeType] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        code = frame.f_code
        if (count := counts.get(id(code))) is None:
            codes[id(code)], count = code, [0]
            counts[id(code)] = count

        def step(frame: FrameType, event: str, _: Any) -> Any:
            if event == "opcode":
                count[0] += 1
            return step

        return step

    def write(number: int, frame: FrameType | None) -> None:
        sys.settrace(None)
        found: dict[str, int] = {}
        for key, count in [*counts.items()]:
            name = f"{codes[key].co_filename}:{codes[key].co_qualname}"
            found[name] = found.get(name, 0) + count[0]
            count[0] = 0
        with open(f"{file}.new", "w") as written:
            json.dump(found, written)
        os.replace(f"{file}.new", file)
        sys.settrace(trace)

    signal.signal(signal.SIGUSR2, write)
    threading.settrace(trace)
    sys.settrace(trace)
