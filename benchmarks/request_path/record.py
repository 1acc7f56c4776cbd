"""What one warm request passes in all processes, read from the notes of ``sitecustomize``."""

from __future__ import annotations

import base64
import io
import json
import mmap
import os
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import tessera
from benchmarks.request_path.sitecustomize import ROLES, VARIABLE, WORD, package_files
from benchmarks.service import Deployment, service

PACKAGE = Path(tessera.__file__).parent
_REPEATS = 8
# What a request leaves to be done behind its answer: cache inserts, leases given back, log lines.
_SETTLE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Stop:
    """A file that a request passes, below the package, and the process that it does so in first."""

    role: str
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """In the order of the first call into each file."""

    text: tuple[Stop, ...]
    image: tuple[Stop, ...]


def record(checkpoint: Path, *, mode: str = "e_p") -> Paths:
    """Starts a service on CPU and sends it texts and images of which none was seen before."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        files = package_files(PACKAGE)
        notes.write_bytes(bytes(WORD * (1 + len(ROLES) * len(files))))
        with _environment(notes):
            engine = {"text": {"device": "cpu"}, "vision": {"device": "cpu"}, "threads": 1}
            deployment = Deployment(model_path=checkpoint, mode=mode, engine=engine, frontend_flags=())
            with service(deployment, Path(folder) / "logs") as (url,), notes.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
                try:
                    text = _path(memory, files, lambda number: _text(url, number))
                    image = _path(memory, files, lambda number: _image(url, number))
                finally:
                    memory.close()
    return Paths(text=text, image=image)


def _path(memory: mmap.mmap, files: list[Path], send: Callable[[int], None]) -> tuple[Stop, ...]:
    """The files that every one of several requests passed: what runs by the clock beside one is left out."""
    send(0)
    send(1)
    found: list[dict[tuple[str, str], int]] = []
    for repeat in range(_REPEATS):
        time.sleep(_SETTLE_SECONDS)
        memory[WORD:] = bytes(len(memory) - WORD)
        memory[0] = 1
        send(2 + repeat)
        time.sleep(_SETTLE_SECONDS)
        memory[0] = 0
        words = memoryview(bytes(memory[WORD:])).cast("Q")
        found.append(
            {
                (role, str(path.relative_to(PACKAGE))): at
                for (role, path), at in zip(((r, p) for r in ROLES for p in files), words, strict=True)
                if at
            }
        )
    always = set.intersection(*(set(passed) for passed in found))
    stops = sorted(always, key=lambda stop: found[0][stop])
    first: dict[str, Stop] = {}
    for role, file in stops:
        first.setdefault(file, Stop(role, file))
    return tuple(first.values())


def _text(url: str, number: int) -> None:
    _ask(url, f"a text that was not asked before, number {number}")


def _image(url: str, number: int) -> None:
    pixels = np.random.default_rng(number).integers(0, 256, (96, 128, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    payload = base64.b64encode(file.getvalue()).decode()
    _ask(url, [{"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{payload}"}}])


def _ask(url: str, entry: Any) -> None:
    body = json.dumps({"model": "benchmark", "input": [entry]}).encode()
    request = urllib.request.Request(
        f"{url}/v1/embeddings", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


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
