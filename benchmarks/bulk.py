"""``python -m benchmarks.bulk``: ``tessera embed`` beside the engines, a program, a service and vLLM.

Every part embeds the same lines of an OpenAI batch, one after the other: texts and images as conversations,
so that vLLM reads the same tokens; ``pdf`` are files that Tessera alone reads. Rates are those of a window of
``--seconds`` behind the first ``--warm`` seconds of work, by what each program says of its own progress, and
a run ends with it. ``vllm run-batch`` has no such window: it begins with all lines at once and ends most
of them together, so its rate is that of all lines, from when its model is loaded, or of those that it
answered in ``--vllm-seconds``. ``python`` reads the lines one by one and embeds them by ``tessera.Embedder``.

Processor time for an item tells two commits apart where others use the machine too. There ``--scale`` makes
fewer items, and ``--limit`` lets a run take longer.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from benchmarks import cpu, usage, vllm_copy
from benchmarks.card import CardMeter
from benchmarks.checkpoint import add_model, made_checkpoint, usual_units
from benchmarks.in_process import sustained
from benchmarks.proc import below
from benchmarks.service import NAME, Deployment, service
from tessera import Embedder
from tessera.models import family_of, open_model
from tessera_tools.load.bodies import WORKLOADS, Bodies, HttpWorkload
from tessera_tools.load.words import CheckpointWords
from tessera_tools.table import number, table

PARTS: Final = ("engine", "embed", "python", "split", "url", "vllm")
HEADER: Final = ("part", "workload", "items/s", "cores", "core ms/item", "limit", "GPU %", "MHz", "W")
_PDF_PAGES: Final = 50
_PROGRESS: Final = re.compile(rb"Running batch:.*?\s(\d+)/(\d+) \[")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bulk:
    """A workload of ``benchmarks.http``, what one H200 does of it in a second, and a batch in process."""

    workload: HttpWorkload
    rate: float
    at_once: int


BULK: Final = {
    "text-1024": Bulk(workload=WORKLOADS["text-1024"], rate=290, at_once=64),
    "text-128": Bulk(workload=WORKLOADS["text-128"], rate=2550, at_once=512),
    "text-32": Bulk(workload=WORKLOADS["text-32"], rate=10300, at_once=2048),
    "tile": Bulk(workload=WORKLOADS["tile"], rate=370, at_once=128),
    "page": Bulk(workload=WORKLOADS["page"], rate=51, at_once=48),
    "pdf": Bulk(workload=WORKLOADS["page"], rate=51, at_once=48),
}


Moment = tuple[float, int, float, str]
"""When a program told of its progress, by ``time.time``; the items that it had done, the processor seconds
that it had used, and what held it up."""


def write_corpus(name: str, model_path: Path, count: int, folder: Path) -> Path:
    """The source of a workload, as a file or a folder; kept where it is there already."""
    path = folder / (name if name == "pdf" else f"{name}.jsonl")
    if path.exists():
        return path
    temporary = folder / f".{path.name}"
    if name == "pdf":
        temporary.mkdir(parents=True)
        for first in range(0, count, _PDF_PAGES):
            (temporary / f"{first}.pdf").write_bytes(_scans(min(_PDF_PAGES, count - first), first))
    else:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            for number_, body in enumerate(_bodies(name, model_path, count)):
                line = {"custom_id": f"{number_}", "method": "POST", "url": "/v1/embeddings", "body": body}
                file.write(json.dumps(line).encode() + b"\n")
    temporary.rename(path)
    return path


def _bodies(name: str, model_path: Path, count: int) -> Iterator[dict[str, Any]]:
    """256 texts again and again, of which nobody keeps an answer; no image is there twice."""
    words = CheckpointWords(model_path)
    bodies = Bodies(BULK[name].workload, words, NAME, seed=5, variety=256, chat=True)
    for body in islice(bodies, count):
        value = json.loads(body.data)
        yield {"model": value["model"], "messages": value["messages"]}


def _scans(count: int, seed: int) -> bytes:
    """A PDF file with pages of noise as a scanner's JPEGs, at 150 dots an inch."""
    noise = np.random.default_rng(seed)
    width, height = BULK["pdf"].workload.size or (0, 0)
    pages = [
        Image.fromarray(
            noise.integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
        ).resize((width, height), Image.Resampling.BICUBIC)
        for _ in range(count)
    ]
    buffer = BytesIO()
    pages[0].save(buffer, "PDF", save_all=True, append_images=pages[1:], resolution=150, quality=85)
    return buffer.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """``rate`` in items a second from ``begin`` to ``end`` of ``time.time``; ``cores`` that were busy."""

    rate: float
    begin: float
    end: float
    cores: float | None = None
    limit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The window of a run: ``seconds`` of it behind ``warm`` ones, within ``limit``."""

    warm: float
    seconds: float
    limit: float

    def is_over(self, moments: Sequence[Moment]) -> bool:
        latest = moments[-1][0] if moments else 0.0
        return bool(moments) and latest >= _begun(moments) + self.warm + self.seconds


def embed(source: Path, out: Path, flags: Sequence[str], count: int, span: Span) -> Found:
    """A run of the command; raises ``RuntimeError`` with what it said where it fails or takes too long."""
    # A run goes on where an earlier one ended.
    shutil.rmtree(out, ignore_errors=True)
    words = [sys.executable, "-m", "tessera.cli", "embed", str(source), "--out", str(out)]
    moments: list[Moment] = []
    said: list[str] = []
    over = late = False
    began = time.time()
    with subprocess.Popen(
        [*words, "--progress", "json", *flags], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if not line.startswith("{"):
                said.append(line)
                continue
            state = json.loads(line)
            spent = cpu.seconds([process.pid, *below(process.pid)])
            moments.append((time.time(), state["embedded"], spent, state["limit"]))
            if not over and not late:
                over, late = span.is_over(moments), time.time() - began > span.limit
                if over or late:
                    process.terminate()
        status = process.wait()
    if late:
        raise RuntimeError(f"tessera embed took more than {span.limit:g} s; see --scale and --limit")
    if not over and status != 0:
        raise RuntimeError(f"tessera embed ended with {status}: {''.join(said[-20:])}")
    Path(f"{out}-moments.json").write_text(json.dumps(moments))
    return window(moments, count, span)


def in_program(source: Path, model_path: Path, count: int, span: Span) -> Found:
    """What a program does with the same lines, which it reads one by one."""
    moments: list[Moment] = []

    def look(done: int, total: int | None) -> None:
        if not moments or time.time() - moments[-1][0] >= 1:
            moments.append((time.time(), done, cpu.seconds([os.getpid(), *below(os.getpid())]), ""))

    with Embedder(model_path) as embedder:
        inputs = takewhile(lambda _: not span.is_over(moments), _inputs(source))
        embedder.embed(inputs, role="passage", progress=look)
    return window(moments, count, span)


def _inputs(source: Path) -> Iterator[list[str | dict[str, str]]]:
    with source.open("rb") as file:
        for line in file:
            (message,) = json.loads(line)["body"]["messages"]
            yield [
                part["text"] if part["type"] == "text" else {"image": part["image_url"]["url"]}
                for part in message["content"]
            ]


def _begun(moments: Sequence[Moment]) -> float:
    """When the first items were embedded, or the last look where none was."""
    return next((at for at, done, *_ in moments if done), moments[-1][0])


def window(moments: Sequence[Moment], count: int, span: Span) -> Found:
    """From the first look behind ``warm`` to the end of ``span``, a twentieth of the items left at least.

    A run that is told to end goes on to look, and makes no progress.
    """
    begin = _begun(moments) + span.warm
    within = sum(at < begin + span.seconds for at, *_ in moments)
    inside = [each for each in moments[: within + 1] if begin <= each[0] and each[1] <= 0.95 * count]
    if len(inside) < 2:
        raise RuntimeError(f"{len(inside)} looks at a window; make --scale or --seconds larger")
    first, last = inside[0], inside[-1]
    seconds = last[0] - first[0]
    limits = [limit for *_, limit in inside]
    return Found(
        rate=(last[1] - first[1]) / seconds,
        begin=first[0],
        end=last[0],
        cores=(last[2] - first[2]) / seconds,
        limit=max(set(limits), key=limits.count),
    )


def run_batch(options: argparse.Namespace, source: Path, count: int) -> Found:
    """vLLM's own command on the same lines; raises ``RuntimeError`` with the end of its log."""
    copy = options.out / "vllm-model"
    if not copy.exists():
        vllm_copy.copy(options.model_path, copy)
    out, log = options.out / f"vllm-{source.stem}.jsonl", options.out / f"vllm-{source.stem}.log"
    words = [options.vllm_python, "-m", vllm_copy.COMMAND, "run-batch", "-i", str(source)]
    words += ["-o", str(out), "--model", str(copy), "--served-model-name", NAME]
    words += [*vllm_copy.serve_flags(family_of(options.model_path).name, copy)]
    words += ["--gpu-memory-utilization", "0.6"]
    moments: list[tuple[float, int]] = []
    with log.open("wb") as file:
        process = subprocess.Popen(
            words,
            env=os.environ | vllm_copy.environment(options.vllm),
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=options.out,
            start_new_session=True,
        )
    started = time.time()
    try:
        while process.poll() is None:
            found = _PROGRESS.findall(log.read_bytes())
            if found and (not moments or int(found[-1][0]) != moments[-1][1]):
                moments.append((time.time(), int(found[-1][0])))
            if time.time() - started > options.vllm_seconds:
                break
            time.sleep(0.2)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
    ended = process.returncode == 0 and bool(moments) and moments[-1][1] == count
    killed = process.returncode == -signal.SIGKILL
    if not moments or not (ended or killed):
        tail = log.read_text(errors="replace").splitlines()[-25:]
        raise RuntimeError("\n".join([f"vllm run-batch: {process.returncode}, {moments}", *tail]))
    begin, end = moments[0][0], moments[-1][0] if ended else time.time()
    limit = "" if ended else f"{moments[-1][1]} of {count} in {end - begin:.0f} s"
    return Found(rate=moments[-1][1] / (end - begin), begin=begin, end=end, limit=limit)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = usage.parser("benchmarks.bulk", __doc__)
    add_model(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["engine", "embed", "url"])
    parser.add_argument("--workloads", nargs="+", choices=tuple(BULK), default=list(BULK))
    parser.add_argument("--warm", type=float, default=8.0, help="seconds before a window")
    parser.add_argument("--seconds", type=float, default=12.0, help="of a window")
    parser.add_argument("--scale", type=float, default=1.0, help="times as many items as an H200 needs")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a run, its start included")
    parser.add_argument("--frontends", type=int, default=6)
    parser.add_argument("--vllm", type=Path, metavar="SITE", help="packages of vLLM")
    parser.add_argument("--vllm-python", default="python3")
    parser.add_argument(
        "--vllm-seconds", type=float, default=300.0, help="for each run of vLLM, its start included"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks-out"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The status is 1 where a part failed."""
    options = _parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    options.out = options.out.resolve()
    options.model_path = made_checkpoint(options, options.out).resolve()
    results: list[tuple[str, ...]] = []
    failed = []
    with CardMeter() as card:

        def keep(part: str, name: str, found: Found) -> None:
            seen = card.between(found.begin, found.end)
            each = 1000 * found.cores / found.rate if found.cores and found.rate else None
            values = (found.rate, found.cores, each)
            card_said = map(number, (seen.busy, seen.mhz, seen.watts))
            results.append((part, name, *map(number, values), found.limit, *card_said))
            print(*results[-1], sep="  ", flush=True)
            with (options.out / "bulk.csv").open("a", newline="") as file:
                csv.writer(file).writerow(results[-1])

        for part in options.parts:
            try:
                _part(part, options, keep)
            except (RuntimeError, OSError) as error:
                print(f"{part} failed: {error}", flush=True)
                failed.append(part)
    print(table(HEADER, results))
    return int(bool(failed))


def _part(part: str, options: argparse.Namespace, keep: Any) -> None:
    units = usual_units(open_model(options.model_path))
    engine: dict[str, object] = {"vision": {"max_batch_cost": units}, "text": {"max_batch_cost": 16384}}
    if part == "engine":
        names = [name for name in options.workloads if name != "pdf"]
        rows = [(BULK[name].workload, BULK[name].at_once) for name in names]
        found = sustained(
            options.model_path, engine, rows, warm=options.warm, seconds=options.seconds, limit=options.limit
        )
        for (name, _), each in found.items():
            keep(part, name, Found(rate=each.rate, begin=each.begin, end=each.end))
        return
    if part == "url":
        deployment = Deployment(model_path=options.model_path, frontends=options.frontends, engine=engine)
        with service(deployment, options.out / "logs") as urls:
            _embed_all(part, options, keep, ["--url", urls[0], "--concurrency", "64"])
        return
    if part in ("embed", "split"):
        flags = ["--model", str(options.model_path), "--served-model-name", NAME]
        flags += ["--split"] if part == "split" else []
        _embed_all(part, options, keep, flags)
        return
    for name in options.workloads:
        if name != "pdf":
            source, count = _source(name, options)
            if part == "python":
                keep(part, name, in_program(source, options.model_path, count, _span(options)))
            else:
                keep(part, name, run_batch(options, source, count))


def _span(options: argparse.Namespace) -> Span:
    return Span(warm=options.warm, seconds=options.seconds, limit=options.limit)


def _embed_all(part: str, options: argparse.Namespace, keep: Any, flags: Sequence[str]) -> None:
    for name in options.workloads:
        source, count = _source(name, options)
        out = options.out / f"{part}-{name}"
        keep(part, name, embed(source, out, flags, count, _span(options)))


def _source(name: str, options: argparse.Namespace) -> tuple[Path, int]:
    count = int(BULK[name].rate * (options.warm + options.seconds + 3) * options.scale)
    return write_corpus(name, options.model_path, count, options.out / "corpus"), count


if __name__ == "__main__":
    raise SystemExit(main())
