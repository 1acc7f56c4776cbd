"""One server after the other under the same load: the engines in process, Tessera, and vLLM.

Each is a part that may fail without the others: what it wrote last is shown, and the next one begins. What
is measured is written at once, so that parts may be run by several commands with the same ``--out``.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks import cpu, http, vllm_copy
from benchmarks.card import CardMeter
from benchmarks.checkpoint import made_checkpoint, usual_units
from benchmarks.in_process import sustained
from benchmarks.ports import free_ports
from tessera.models import family_of, open_model
from tessera.models.base import OutputKind
from tessera_tools.load.bodies import WORKLOADS, Bodies, HttpWorkload
from tessera_tools.load.clients import drive, matrix
from tessera_tools.load.words import CheckpointWords
from tessera_tools.table import number, table

PARTS: Final = ("engine", "default", "split", "vllm")
"""The engines in process; Tessera with nothing set, and so as encode and embed workers; vLLM."""

USUAL: Final = [
    ("text-32", 1),
    ("tile", 1),
    ("text-1024", 64),
    ("text-128", 512),
    ("text-32x64", 32),
    ("tile", 128),
    ("page", 48),
    ("tile-again", 128),
]
"""Workloads, and how many requests there are at once."""

HEADER: Final = (
    "server", "workload", "at once", "inputs/s", "p50 ms", "p99 ms", "errors",
    "frontend cores", "worker cores", "decoder cores", "GPU %", "MHz", "W", "J an input",
)  # fmt: skip
_RATIOS: Final = (
    ("default", "vllm"),
    ("engine", "vllm"),
    ("default", "engine"),
    ("split", "engine"),
)
_ROOT: Final = Path(__file__).parent.parent
_READY_SECONDS: Final = 300.0
_STOP_SECONDS: Final = 40.0
_VECTORS_SECONDS: Final = 60.0
# A row takes this much longer than its load: client processes start and end.
_ROW_SECONDS: Final = 10.0
_TAIL_LINES: Final = 25

Vectors = npt.NDArray[np.float32]


class PartFailed(Exception):
    """Says what a part could not do."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server is, and whether it takes texts as conversations alone."""

    name: str
    url: str
    chat: bool


class Clock:
    """The time that is left of the whole."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def need(self, seconds: float, what: str) -> None:
        """Raise ``PartFailed`` when that much is not left."""
        if self.left < seconds:
            raise PartFailed(f"{self.left:.0f} s are left, too few for {what}")


class Results:
    """The rows and vectors in a folder, of this run and of those before it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "peer.csv"
        self.rows: dict[tuple[str, str, str], dict[str, str]] = {}
        if self._path.exists():
            with self._path.open() as file:
                for row in csv.DictReader(file):
                    self._keep(row)

    def _keep(self, row: dict[str, str]) -> None:
        self.rows[row["server"], row["workload"], row["at once"]] = row

    def add(self, values: Mapping[str, str | float | None]) -> None:
        row = {
            name: f"{value:.6g}" if isinstance(value, float) else str("" if value is None else value)
            for name, value in ((name, values.get(name)) for name in HEADER)
        }
        self._keep(row)
        print("  ".join(f"{name} {value}" for name, value in row.items() if value), flush=True)
        with self._path.open("w", newline="") as file:
            writer = csv.DictWriter(file, HEADER)
            writer.writeheader()
            writer.writerows(self.rows.values())

    def save_vectors(self, server: str, vectors: Mapping[str, Vectors]) -> None:
        np.savez(self._folder / f"vectors-{server}.npz", **dict(vectors))

    def vectors(self, server: str) -> dict[str, Vectors]:
        path = self._folder / f"vectors-{server}.npz"
        if not path.exists():
            return {}
        with np.load(path) as stored:
            return {name: stored[name] for name in stored.files}

    def value(self, server: str, workload: str, at_once: str, column: str) -> float | None:
        text = self.rows.get((server, workload, at_once), {}).get(column)
        return float(text) if text else None

    def summary(self) -> str:
        """Ratios of inputs a second, with one request at once of the time for it, and how answers agree."""
        header = (
            "workload", "at once", *(f"{part}/s" for part in PARTS), *(f"{part} p50 ms" for part in PARTS),
            *(f"{one}/{other}" for one, other in _RATIOS), "agreement",
        )  # fmt: skip
        theirs = self.vectors("vllm")
        ours = self.vectors("default")
        rows: list[tuple[str, ...]] = []
        for workload, at_once in dict.fromkeys(key[1:] for key in self.rows):
            rates, times = (
                {part: self.value(part, workload, at_once, column) for part in PARTS}
                for column in ("inputs/s", "p50 ms")
            )
            speeds = rates
            if at_once == "1":
                speeds = {part: taken and 1e3 / taken for part, taken in times.items()}
            ratios = [_ratio(speeds[one], speeds[other]) for one, other in _RATIOS]
            agreement = "-"
            if workload in theirs and workload in ours:
                agreement = _agreement(theirs[workload], ours[workload])
            values = (*rates.values(), *times.values(), *ratios)
            rows.append((workload, at_once, *map(number, values), agreement))
        return table(header, rows)


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


def _agreement(theirs: Vectors, ours: Vectors) -> str:
    """The worst cosine of vectors; of scores the worst difference beside their deviation."""
    if theirs.ndim > 1:
        return f"{(theirs * ours).sum(axis=1).min():.6f}"
    return f"{np.abs(theirs - ours).max():.4f} of {theirs.std():.3f}"


def compare(options: argparse.Namespace) -> int:
    """Run the parts of ``options``; 1 when one of them failed."""
    options.out.mkdir(parents=True, exist_ok=True)
    options.out = options.out.resolve()
    clock = Clock(options.limit)
    results = Results(options.out)
    if options.model_path is None and (options.out / "model").exists():
        options.model_path = options.out / "model"
    options.model_path = made_checkpoint(options, options.out).resolve()
    options.units = options.units or usual_units(open_model(options.model_path))
    failed = []
    with CardMeter() as card:
        for part in options.parts:
            print(f"== {part}, {clock.left:.0f} s left", flush=True)
            try:
                if part == "engine":
                    _engine(options, results, card, clock)
                    continue
                with _vllm(options, clock) if part == "vllm" else _tessera(options, part, clock) as server:
                    _drive(options, server, results, card, clock)
            except (PartFailed, RuntimeError, OSError, subprocess.SubprocessError) as error:
                print(f"{part} failed: {error}", flush=True)
                failed.append(part)
    print("\n" + results.summary())
    if failed:
        print("failed: " + ", ".join(failed))
    return int(bool(failed))


def _engine(options: argparse.Namespace, results: Results, card: CardMeter, clock: Clock) -> None:
    clock.need(len(options.workloads) * (options.warm + options.seconds) + _ROW_SECONDS, "the engines")
    rows = [(WORKLOADS[name], loop) for name, loop in options.workloads]
    found = sustained(
        options.model_path,
        _engine_config(options),
        rows,
        warm=options.warm,
        seconds=options.seconds,
        limit=clock.left,
    )
    for (name, loop), each in found.items():
        seen = card.between(each.begin, each.end)
        results.add(
            {
                "server": "engine",
                "workload": name,
                "at once": str(loop),
                "inputs/s": each.rate,
                "p50 ms": each.latency and each.latency * 1e3,
                "GPU %": seen.busy,
                "MHz": seen.mhz,
                "W": seen.watts,
                "J an input": _joules(seen.watts, each.rate),
            }
        )


def _joules(watts: float | None, rate: float | None) -> float | None:
    """What the cards draw for an input."""
    return watts / rate if watts and rate else None


def _drive(
    options: argparse.Namespace, server: Server, results: Results, card: CardMeter, clock: Clock
) -> None:
    load = replace(http.load(options), chat=server.chat, tolerance=0.02, path=_path(options))
    try:
        results.save_vectors(server.name, _vectors(options, server))
    except (OSError, ValueError, KeyError) as error:
        print(f"{server.name} gave no vectors to compare: {error!r}", flush=True)
    for name, loop in options.workloads:
        clock.need(load.warm + load.seconds + _ROW_SECONDS, f"{name}@{loop}")
        window = http.Window()
        outcome = drive(load, (server.url,), WORKLOADS[name], loop, window)
        seen = card.between(window.began, window.ended)
        half, most = outcome.quantiles(0.5, 0.99)
        results.add(
            {
                "server": server.name,
                "workload": name,
                "at once": str(loop),
                "inputs/s": outcome.inputs_rate,
                "p50 ms": half,
                "p99 ms": most,
                "errors": " ".join(f"{times}x{why}" for why, times in outcome.errors.items()),
                "frontend cores": window.meter.cores("frontend"),
                "worker cores": window.meter.cores(*cpu.WORKERS),
                "decoder cores": window.meter.cores("decoders"),
                "GPU %": seen.busy,
                "MHz": seen.mhz,
                "W": seen.watts,
                "J an input": _joules(seen.watts, outcome.inputs_rate),
            }
        )


def _vectors(options: argparse.Namespace, server: Server) -> dict[str, Vectors]:
    """Two answers for each workload, unit vectors ``[inputs, width]`` or scores ``[inputs]``.

    Of a matrix it is the mean of its rows.
    """
    words = CheckpointWords(options.model_path)
    every: dict[str, Vectors] = {}
    end = time.monotonic() + _VECTORS_SECONDS
    for workload in {name: WORKLOADS[name] for name, _ in options.workloads}.values():
        bodies = Bodies(
            _short(workload),
            words,
            options.model_name,
            seed=3,
            variety=2,
            encoding="float",
            chat=server.chat,
            path=_path(options),
        )
        rows = []
        for body in islice(bodies, 2):
            request = urllib.request.Request(
                f"{server.url}{body.path}", body.data, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=max(1.0, end - time.monotonic())) as answer:
                found = json.load(answer)
                if workload.query:
                    rows += [row["score"] for row in found["data"]]
                else:
                    rows += [matrix(row, found).mean(axis=0) for row in found["data"]]
        values = np.array(rows, np.float32)
        if not workload.query:
            values /= np.linalg.norm(values, axis=1, keepdims=True)
        every[workload.name] = values
    return every


def _path(options: argparse.Namespace) -> str:
    """Where both servers embed: vLLM gives a vector of each token there alone."""
    tokens = open_model(options.model_path).output.kind is OutputKind.TOKENS
    return "/pooling" if tokens else "/v1/embeddings"


def _short(workload: HttpWorkload) -> HttpWorkload:
    return replace(workload, inputs=min(workload.inputs, 8))


def _engine_config(options: argparse.Namespace) -> dict[str, Any]:
    config = dict(http.deployment(options).engine)
    for stage, changed in _quantization(options).items():
        config[stage] = config[stage] | changed
    return config


def _quantization(options: argparse.Namespace) -> dict[str, dict[str, str]]:
    if not options.quantization:
        return {}
    return {stage: {"quantization": options.quantization} for stage in ("vision", "text")}


@contextmanager
def _tessera(options: argparse.Namespace, part: str, clock: Clock) -> Iterator[Server]:
    port, *_, system = free_ports(2 + options.frontends)
    with tempfile.TemporaryDirectory() as store:
        environment = {
            "TESSERA_MODEL_PATH": str(options.model_path),
            "TESSERA_SERVED_MODEL_NAME": options.model_name,
            "TESSERA_PORT": str(port),
            "TESSERA_SYSTEM_PORT_BASE": str(system),
            "DYN_FILE_KV": store,
            "VENV": sys.prefix,
        }
        command = [str(_ROOT / "launch" / ("e_p.sh" if part == "split" else "agg.sh"))]
        if options.quantization:
            command += ["--override-engine-args", json.dumps(_quantization(options))]
        url = f"http://127.0.0.1:{port}"
        with _running(command, environment, url, options.out / f"{part}.log", clock):
            yield Server(part, url, chat=False)


@contextmanager
def _vllm(options: argparse.Namespace, clock: Clock) -> Iterator[Server]:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    # Where the load is as it was.
    copy = options.out / "vllm-model"
    if not copy.exists():
        vllm_copy.copy(options.model_path, copy)
    environment = vllm_copy.environment(options.vllm)
    command = [options.vllm_python, "-m", vllm_copy.COMMAND, "serve", str(copy)]
    command += ["--served-model-name", options.model_name, "--host", "127.0.0.1", "--port", str(port)]
    command += vllm_copy.serve_flags(family_of(options.model_path).name, copy)
    if options.quantization:
        command += ["--quantization", options.quantization]
    command += ["--gpu-memory-utilization", "0.6", "--api-server-count", str(options.api_servers)]
    if options.vllm_command:
        # A stand-in; its environment is this one.
        words = {"port": port, "model": options.model_path, "name": options.model_name}
        command, environment = shlex.split(options.vllm_command.format(**words)), {}
    with _running(command, environment, url, options.out / "vllm.log", clock):
        yield Server("vllm", url, chat=vllm_copy.is_chat(copy))


@contextmanager
def _running(
    command: Sequence[str], environment: Mapping[str, str], url: str, log: Path, clock: Clock
) -> Iterator[None]:
    """A server in a process group of its own, once it is ready; shows the end of its log when it fails."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            start_new_session=True,
        )
    try:
        started = time.monotonic()
        limit = min(_READY_SECONDS, clock.left)
        while not _healthy(url):
            if process.poll() is not None:
                raise PartFailed(f"it ended with {process.returncode} while it started")
            if time.monotonic() - started > limit:
                raise PartFailed(f"it was not ready within {limit:.0f} s")
            time.sleep(0.5)
        print(f"ready after {time.monotonic() - started:.0f} s", flush=True)
        yield
        if process.poll() is not None:
            raise PartFailed(f"it ended with {process.returncode} under load")
    except BaseException:
        lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        print(f"the end of {log}:", *lines, sep="\n  ", flush=True)
        raise
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the whole group: first by its own ways, and what is left of it at once."""
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
