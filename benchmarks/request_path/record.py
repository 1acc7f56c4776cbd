"""What one warm request passes in all processes, read from the notes of ``sitecustomize``."""

from __future__ import annotations

import base64
import functools
import io
import json
import math
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.proc import below, runs
from benchmarks.request_path.sitecustomize import ROLES, VARIABLE, WORD, lines_of
from benchmarks.service import Deployment, service
from benchmarks.shape import PACKAGE, Part, Shape, outermost, shape

_REPEATS = 12
# A request leaves cache inserts, leases and log lines to be done behind its answer. They are when each
# process has been seen so often, by turns, with no thread that runs or waits for a processor.
_ROUNDS = 5
_PAUSE_SECONDS = 0.02
_MOST_SECONDS = 60.0
# Longer than any period of what runs by the clock: looks at discovery, at workers, at notifications.
_IDLE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Stop:
    """A file that a request passes, below the package, and the process that it does so in first."""

    role: str
    file: str


@dataclass(frozen=True, slots=True)
class RequestPath:
    """The files in the order of the first call into each, and the functions that run, by file and line.

    A function counts once, in whichever process it runs, and within the one around it if that runs too.
    """

    stops: tuple[Stop, ...]
    functions: tuple[Part, ...]

    @property
    def lines_of_files(self) -> int:
        return sum(len((PACKAGE / stop.file).read_text().splitlines()) for stop in self.stops)

    @property
    def lines_of_functions(self) -> int:
        return sum(function.lines for function in self.functions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    text: RequestPath
    image: RequestPath


def record(checkpoint: Path, *, mode: str = "e_p") -> Paths:
    """Starts a service on CPU and sends it texts and images of which none was seen before."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "notes"
        notes = _Notes(file)
        try:
            with _environment(file):
                engine = {"text": {"device": "cpu"}, "vision": {"device": "cpu"}, "threads": 1}
                deployment = Deployment(model_path=checkpoint, mode=mode, engine=engine, frontend_flags=())
                with (
                    service(deployment, Path(folder) / "logs") as (url,),
                    # As clients do, which keep their connections.
                    closing(HTTPConnection(url.removeprefix("http://"), timeout=60)) as connection,
                ):
                    text = _path(notes, lambda number: _text(connection, number))
                    image = _path(notes, lambda number: _image(connection, number))
        finally:
            notes.close()
    return Paths(text=text, image=image)


Function = tuple[str, str, int]
"""The role, the file below the package, the first line."""


@dataclass(frozen=True, slots=True)
class _Calls:
    """How often each function was called in so many seconds, and after how many nanoseconds first."""

    seconds: float
    called: dict[Function, tuple[int, int]]


class _Notes:
    """What the processes have noted."""

    def __init__(self, file: Path) -> None:
        # Of each file and not of each of its lines: 0.1 s, not 4.
        counts = [
            (str(Path(path).relative_to(PACKAGE)), count) for path, (_, count) in lines_of(PACKAGE).items()
        ]
        self._functions: list[Function] = [
            (role, name, line) for role in ROLES for name, count in counts for line in range(count)
        ]
        file.write_bytes(bytes(WORD * (1 + 2 * len(self._functions))))
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), 0)

    def during(self, work: Callable[[], object]) -> _Calls:
        self._memory[WORD:] = bytes(len(self._memory) - WORD)
        began = time.monotonic_ns()
        self._memory[0] = 1
        try:
            work()
        finally:
            self._memory[0] = 0
        seconds = (time.monotonic_ns() - began) / 1e9
        words = np.frombuffer(self._memory[WORD:], np.uint64).reshape(-1, 2)
        called = {
            self._functions[place]: (int(words[place, 0]), int(words[place, 1]) - began)
            for place in np.flatnonzero(words[:, 0])
        }
        return _Calls(seconds=seconds, called=called)

    def close(self) -> None:
        self._memory.close()


# Looks by the clock, but works only behind work: within each window where a busy machine makes windows long,
# and never beside them.
_BEHIND_WORK = {"free_memory.py"}


def _path(notes: _Notes, send: Callable[[int], None]) -> RequestPath:
    """The functions that every request calls, and their files.

    What runs by the clock is called between requests as often as beside them, and is left out. Chance is
    allowed for: twice the root of the expected calls, and three times for loops that turn several times in
    each window.
    """
    send(0)
    send(1)
    found: list[_Calls] = []
    for repeat in range(_REPEATS):
        _settle()

        def ask(number: int = 2 + repeat) -> None:
            send(number)
            _settle()

        found.append(notes.during(ask))
    seconds = sum(calls.seconds for calls in found)
    # As long as all windows together, which a busy machine makes longer than the loops' pauses.
    idle = notes.during(lambda: time.sleep(max(_IDLE_SECONDS, seconds)))

    def belongs(function: Function) -> bool:
        if function[1] in _BEHIND_WORK:
            return False
        by_clock = idle.called.get(function, (0, 0))[0] / idle.seconds * seconds
        called = sum(calls.called[function][0] for calls in found)
        chance = (3 if by_clock > 2 * _REPEATS else 2) * math.sqrt(by_clock)
        return called - by_clock > _REPEATS / 2 + chance

    always = [*filter(belongs, set.intersection(*(set(calls.called) for calls in found)))]
    first: dict[str, Stop] = {}
    for function in sorted(
        always, key=lambda function: statistics.median(c.called[function][1] for c in found)
    ):
        role, file, _ = function
        first.setdefault(file, Stop(role, file))
    return RequestPath(tuple(first.values()), _source(always))


def _settle() -> None:
    """Wait until the service does nothing but by the clock; raises ``TimeoutError``."""
    end = time.monotonic() + _MOST_SECONDS
    for _ in range(_ROUNDS):
        at_work = below(os.getpid())
        while at_work:
            if time.monotonic() > end:
                raise TimeoutError(f"the service is at work {_MOST_SECONDS:.0f} s behind an answer")
            time.sleep(_PAUSE_SECONDS)
            at_work = [pid for pid in at_work if runs(pid)]


def _source(called: Iterable[Function]) -> tuple[Part, ...]:
    """Where the functions are written. Comprehensions, which are called too, lie in the function around."""
    begins: dict[tuple[str, int], Part] = {}
    # Of several that begin in one line, the call may be of any: the longest has the others in it.
    for part in sorted(_shape().functions, key=lambda part: part.lines):
        begins[part.file, part.first] = part
    return outermost(begins[file, line] for _, file, line in called if (file, line) in begins)


@functools.cache
def _shape() -> Shape:
    return shape(PACKAGE)


def _text(connection: HTTPConnection, number: int) -> None:
    _ask(connection, f"a text that was not asked before, number {number}")


def _image(connection: HTTPConnection, number: int) -> None:
    pixels = np.random.default_rng(number).integers(0, 256, (96, 128, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    payload = base64.b64encode(file.getvalue()).decode()
    _ask(connection, [{"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{payload}"}}])


def _ask(connection: HTTPConnection, entry: Any) -> None:
    body = json.dumps({"model": "benchmark", "input": [entry]}).encode()
    connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status} {answer.reason}")


@contextmanager
def _environment(notes: Path) -> Iterator[None]:
    added = {
        VARIABLE: f"{notes}{os.pathsep}{PACKAGE}",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
