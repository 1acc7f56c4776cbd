"""Counts of the bytecodes of Python that a process runs, by function: alike for the same work anywhere."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from types import CodeType, FrameType
from typing import Any, Final

VARIABLE: Final = "TESSERA_BENCHMARK_BYTECODES"
"""Names the file of a process's counts, which it writes, and begins anew, at each SIGUSR2."""


def begin() -> None:
    """Count in this process from now on, if it is asked to; not in those that it starts."""
    file = os.environ.pop(VARIABLE, None)
    if not file:
        return
    # By identity: the hash of a code is that of all that is in it.
    counts: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    # Kept, so that no other has its identity.
    codes: list[CodeType] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        code = frame.f_code
        if (count := counts.get(id(code))) is None:
            codes.append(code)
            count = counts[id(code)] = [0]
            names[id(code)] = _name(frame)

        def step(frame: FrameType, event: str, _: Any) -> Any:
            if event == "opcode":
                count[0] += 1
            return step

        return step

    def write(number: int, frame: FrameType | None) -> None:
        sys.settrace(None)
        found: dict[str, int] = {}
        for key, count in [*counts.items()]:
            found[names[key]] = found.get(names[key], 0) + count[0]
            count[0] = 0
        with open(f"{file}.new", "w") as written:
            json.dump(found, written)
        os.replace(f"{file}.new", file)
        sys.settrace(trace)

    signal.signal(signal.SIGUSR2, write)
    threading.settrace(trace)
    sys.settrace(trace)


def _name(frame: FrameType) -> str:
    """Name a function by its file, or one that was made of a text by the class that has it."""
    code = frame.f_code
    if code.co_filename != "<string>" or not code.co_argcount:
        return f"{code.co_filename}:{code.co_qualname}"
    first = frame.f_locals[code.co_varnames[0]]
    owner = first if isinstance(first, type) else type(first)
    return f"{owner.__module__}:{owner.__qualname__}.{code.co_name}"
