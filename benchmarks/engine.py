"""``python -m benchmarks.engine``: what the engines do in process, beside the products they consist of.

The bound of a row is what the matrix products of its batch take alone, at the same shapes, in turns with the
engine, each for as long, so that the card holds the clock of that load. Attention counts in the last column,
by the fastest kernel there is; norms and everything else come on top, so no share reaches 100 %.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from benchmarks import usage
from benchmarks.accuracy import text_cosine, vision_cosine
from benchmarks.batches import (
    IMAGE,
    MIXED,
    PAGE,
    SMALL,
    SMALL_PAGE,
    Images,
    Size,
    Workload,
    image_sets,
    text_batch,
    vision_batch,
    workloads,
)
from benchmarks.checkpoint import add_model, made_checkpoint, usual_units
from benchmarks.kernels import kernels
from benchmarks.products import Tower, attention, chain, sustained, text_tower, vision_tower
from tessera.engine.factory import make_text_engine, make_vision_engine
from tessera.engine.placement import Placement, place
from tessera.engine.settings import EngineSettings
from tessera.launched import Launched
from tessera.models import Model, open_model
from tessera.worker.settings import load_stages
from tessera_tools.table import number, table, write_csv

T = TypeVar("T")

HEADER = ("workload", "batch", "ms", "per s", "bound", "share %", "with attention %")
_TURNS = 2


@dataclass(frozen=True, slots=True)
class Taken:
    """Seconds of a batch by the engine, of its products alone, and of its attention alone."""

    engine: float
    products: float
    attention: float

    def over(self, items: int) -> Taken:
        return Taken(self.engine / items, self.products / items, self.attention / items)


class Engines:
    """Both engines of one checkpoint, warm."""

    def __init__(self, model: Model, *, text: EngineSettings, vision: EngineSettings) -> None:
        self.model = model
        self.placement: Placement = place(text)
        self.text = _timed("text engine", lambda: make_text_engine(model, text, self.placement))
        self.vision = None
        if model.vision is not None:
            self.vision = _timed("vision engine", lambda: make_vision_engine(model, vision, self.placement))
        _timed("text warm-up", self.text.warm)
        if self.vision is not None:
            _timed("vision warm-up", self.vision.warm)

    def close(self) -> None:
        self.text.close()
        if self.vision is not None:
            self.vision.close()

    def encoded(self, size: Size) -> torch.Tensor:
        """The vision rows of an image of noise."""
        assert self.vision is not None
        batch = vision_batch(self.model, (size,), seed=0)
        rows = self.rows(batch.plans[0].rows)
        self.vision.launch(batch, [rows]).result()
        return rows

    def rows(self, count: int) -> torch.Tensor:
        """Room for so many vision rows."""
        assert self.model.vision is not None
        return torch.empty(
            count,
            self.model.vision.row_width,
            dtype=self.placement.torch_dtype,
            device=self.placement.device,
        )


class Benchmark:
    """The rows measured so far of both engines of one checkpoint."""

    def __init__(self, engines: Engines, *, tokens: int, duration: float, profiles: bool = False) -> None:
        self.engines = engines
        self.model, self.placement = engines.model, engines.placement
        self.text, self.vision = engines.text, engines.vision
        self.tokens = tokens
        self.duration = duration
        self.profiles = profiles
        self.table: list[tuple[str, ...]] = []
        self._images: dict[Size, Taken] = {}

    def run_vision(self, images: Images) -> None:
        """One row for a vision batch."""
        vision = self.vision
        assert vision is not None
        batch = vision_batch(self.model, images.sizes, seed=len(images.sizes))
        out = [self.engines.rows(plan.rows) for plan in batch.plans]
        taken = self._turns(
            lambda: vision.launch(batch, out), vision.depth, vision_tower(self.model), batch.units
        )
        self._add(images.name, len(images.sizes), taken)
        self._profile(lambda: vision.launch(batch, out))
        if len(set(images.sizes)) == 1:
            # The largest batch comes last and stays.
            self._images[images.sizes[0]] = taken.over(len(images.sizes))

    def run_text(self, workload: Workload) -> None:
        """One row for the text engine alone and, with images, one for both engines one after the other."""
        rows = None if workload.size is None else self.engines.encoded(workload.size)
        batch = text_batch(self.model, workload, rows, seed=1, budget=self.tokens)
        items = len(batch.lengths)
        taken = self._turns(
            lambda: self.text.launch(batch), self.text.depth, text_tower(self.model), batch.lengths
        )
        self._add(workload.name + (", text stage" if rows is not None else ""), items, taken)
        self._profile(lambda: self.text.launch(batch))
        if workload.size is not None and workload.size in self._images:
            image = self._images[workload.size]
            both = Taken(
                taken.engine + items * image.engine,
                taken.products + items * image.products,
                taken.attention + items * image.attention,
            )
            self._add(workload.name, items, both)

    def run_latency(self, sizes: Sequence[Size]) -> None:
        """Single requests, one after the other."""
        found = [Workload(name="latency, text 32 tokens", tokens=32)]
        alone = self.model.vision is not None and self.model.vision.gives_output
        if self.vision is not None:
            found += [
                Workload(
                    name=f"latency, image {size[0]}x{size[1]}" + (" + text" if not alone else ""), size=size
                )
                for size in sizes
            ]
        for workload in found:
            images, rows = None, None
            if workload.size is not None:
                images = vision_batch(self.model, (workload.size,), seed=0)
                rows = self.engines.rows(images.plans[0].rows)
            text = None
            if workload.size is None or not alone:
                text = text_batch(self.model, workload, rows, seed=1)
            times = []
            for _ in range(30):
                started = time.perf_counter()
                if images is not None and rows is not None and self.vision is not None:
                    self.vision.launch(images, [rows]).result()
                if text is not None:
                    self.text.launch(text).result()
                times.append(time.perf_counter() - started)
            self._add(workload.name, 1, Taken(statistics.median(times[10:]), 0.0, 0.0))

    def _profile(self, launch: Callable[[], Launched[object]]) -> None:
        if not self.profiles:
            return
        for name, milliseconds, share in kernels(launch):
            print(f"    {milliseconds:8.3f} ms  {share:5.1f} %  {name}", flush=True)

    def _turns(
        self, launch: Callable[[], Launched[object]], depth: int, tower: Tower, sizes: Sequence[int]
    ) -> Taken:
        """The engine, the products and the attention of ``sizes`` in turns."""
        device, dtype = self.placement.device, self.placement.torch_dtype
        products = chain(tower.products(sum(sizes)), device, dtype)
        kernels = attention(tower.scores(sizes), device, dtype)
        turns = []
        for _ in range(_TURNS):
            engine = steady(launch, depth, self.duration / _TURNS)
            bare = sustained(products, device, self.duration / _TURNS)
            each = self.duration / _TURNS / (4 * len(kernels))
            fastest = min(sustained(kernel, device, each) for kernel in kernels)
            turns.append((engine, bare, fastest))
        return Taken(*(sum(column) / _TURNS for column in zip(*turns, strict=True)))

    def _add(self, name: str, items: int, taken: Taken) -> None:
        bound = taken.products or None
        self.table.append(
            (
                name,
                str(items),
                number(taken.engine * 1e3),
                number(items / taken.engine),
                number(items / bound if bound else None),
                number(100 * bound / taken.engine if bound else None),
                number(100 * (bound + taken.attention) / taken.engine if bound else None),
            )
        )
        print("  ".join(self.table[-1]), flush=True)


def steady(launch: Callable[[], Launched[object]], depth: int, duration: float) -> float:
    """Seconds a batch takes while the next one is launched behind it, as a worker does, for so long."""
    flying: deque[Launched[object]] = deque(launch() for _ in range(depth))
    count, started = 0, time.perf_counter()
    while count < 3 or time.perf_counter() - started < duration:
        flying.popleft().result()
        flying.append(launch())
        count += 1
    taken = (time.perf_counter() - started) / count
    for launched in flying:
        launched.result()
    return taken


def _timed(what: str, make: Callable[[], T]) -> T:
    started = time.perf_counter()
    made = make()
    print(f"{what}: {time.perf_counter() - started:.1f} s", flush=True)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    parser = usage.parser("benchmarks.engine", __doc__)
    add_model(parser)
    parser.add_argument("--config", type=Path, help="an engine config, for other engines and their budgets")
    parser.add_argument("--tokens", type=int, default=16384, help="the text engine's budget")
    parser.add_argument("--units", type=int, help="the vision engine's budget, in tiles or patches")
    parser.add_argument("--seconds", type=float, default=1.5, help="for each row's engine, and its products")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="TEXT", help="rows whose name has one of these"
    )
    parser.add_argument("--out", type=Path, help="a directory for engine.csv")
    parser.add_argument("--profile", action="store_true", help="the kernels of each row, on a card")
    parser.add_argument("--no-check", action="store_true", help="skip the comparison with float32")
    parser.add_argument("--no-rates", action="store_true", help="skip the timed rows")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        _run(open_model(made_checkpoint(options, Path(folder))), options)
    return 0


def _open(given: EngineSettings, usual: EngineSettings) -> EngineSettings:
    batch = given.max_batch_cost or usual.max_batch_cost
    return msgspec.structs.replace(
        given, max_batch_cost=batch, max_queue_cost=max(batch, given.max_queue_cost)
    )


def _run(model: Model, options: argparse.Namespace) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"torch {torch.__version__}, {device}, {model.family}")
    small = options.size == "tiny"
    options.units = options.units or usual_units(model)
    if small:
        options.tokens = min(options.tokens, 256)
        if model.vision is not None:
            options.units = min(options.units, 2 * model.plan(*SMALL_PAGE, param="image").units)
    text = EngineSettings(max_batch_cost=options.tokens, max_queue_cost=options.tokens)
    vision = EngineSettings(max_batch_cost=options.units, max_queue_cost=options.units)
    if options.config is not None:
        stages = load_stages(options.config, None)
        # What it leaves open is as without a file.
        text, vision = _open(stages.text, text), _open(stages.vision, vision)
        options.tokens, options.units = text.max_batch_cost, vision.max_batch_cost
    engines = Engines(model, text=text, vision=vision)
    profiles = options.profile and torch.cuda.is_available()
    benchmark = Benchmark(engines, tokens=text.max_batch_cost, duration=options.seconds, profiles=profiles)
    if not options.no_rates:
        _measure(benchmark, options, small)
    if not options.no_check:
        size, sizes = (SMALL, (SMALL_PAGE, SMALL)) if small else (IMAGE, MIXED[:5])
        worst = text_cosine(model, benchmark.text, benchmark.placement, size)
        line = f"worst cosine against float32: text {worst:.6f}"
        if benchmark.vision is not None:
            row = vision_cosine(model, benchmark.vision, benchmark.placement, sizes)
            line += f", vision rows {row:.6f}"
        print(line)


def _measure(benchmark: Benchmark, options: argparse.Namespace, small: bool) -> None:
    model = benchmark.model

    def asked(name: str) -> bool:
        return not options.only or any(text in name for text in options.only)

    if benchmark.vision is not None:
        for images in image_sets(model, budget=options.units, small=small):
            if asked(images.name):
                benchmark.run_vision(images)
    for workload in workloads(model, budget=options.tokens, small=small):
        if asked(workload.name):
            benchmark.run_text(workload)
    benchmark.run_latency((SMALL,) if small else (IMAGE, PAGE))
    print("\n" + table(HEADER, benchmark.table))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        write_csv(options.out / "engine.csv", HEADER, benchmark.table)


if __name__ == "__main__":
    raise SystemExit(main())
