"""``python -m benchmarks.engine``: what the engines do in process, beside the products they consist of.

The bound of a row is what the matrix products of its batch take alone, at the same shapes, in the same
run. Attention, norms and everything else come on top, so no share reaches 100 %.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks import usage
from benchmarks.accuracy import text_cosine, vision_cosine
from benchmarks.batches import Workload, random_tiles, text_batch, workloads
from benchmarks.products import Product, seconds, text_products, vision_products
from benchmarks.table import number, table, write_csv
from tessera.engine.factory import make_text_engine, make_vision_engine
from tessera.engine.placement import Placement, place
from tessera.engine.settings import EngineSettings
from tessera.launched import Launched
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tessera.tools.random_checkpoint.checkpoint import main as make_checkpoint
from tessera.worker.settings import load_stages

T = TypeVar("T")

HEADER = ("workload", "batch", "ms", "per s", "bound", "share %")


class Benchmark:
    """Both engines of one checkpoint, and the rows measured so far."""

    def __init__(
        self, model: LlamaNemotronVL, *, text: EngineSettings, vision: EngineSettings, duration: float
    ) -> None:
        self.model = model
        self.tokens = text.max_batch_cost
        self.duration = duration
        self.rows: list[tuple[str, ...]] = []
        self._products: dict[Product, float] = {}
        self.placement: Placement = place(text)
        self.text = _timed("text engine", lambda: make_text_engine(model, text, self.placement))
        self.vision = _timed("vision engine", lambda: make_vision_engine(model, vision, self.placement))
        _timed("text warm-up", self.text.warm)
        _timed("vision warm-up", self.vision.warm)

    def run_vision(self, count: int) -> float:
        """Seconds for one batch of tiles."""
        tiles = random_tiles(self.model, count, seed=count)
        out = self._rows(count)
        taken = self._steady(lambda: self.vision.launch([tiles], [out]), self.vision.depth)
        self._add(
            f"vision, {count} tiles", count, taken, self._bound(vision_products(self.model.config, count))
        )
        return taken / count

    def run_text(self, workload: Workload, tile_seconds: float) -> None:
        """One row for the text engine alone and, with tiles, one for both engines one after the other."""
        rows = self._rows(workload.tiles) if workload.tiles else None
        if rows is not None:
            tiles = random_tiles(self.model, workload.tiles, seed=0)
            self.vision.launch([tiles], [rows]).result()
        batch = text_batch(self.model, workload, rows, seed=1, budget=self.tokens)
        items, total = len(batch.lengths), sum(batch.lengths)
        taken = self._steady(lambda: self.text.launch(batch), self.text.depth)
        bound = self._bound(text_products(self.model.config, total))
        self._add(workload.name + (", text stage" if workload.tiles else ""), items, taken, bound)
        if workload.tiles:
            tiles_in_all = workload.tiles * items
            products = list(vision_products(self.model.config, 32 if items > 2 else workload.tiles))
            each = self._bound(products) / (32 if items > 2 else workload.tiles)
            self._add(workload.name, items, taken + tiles_in_all * tile_seconds, bound + tiles_in_all * each)

    def run_latency(self) -> None:
        """Single requests, one after the other."""
        for name, tokens, count in (("latency, text 32 tokens", 32, 0), ("latency, 1 tile + 8 tokens", 8, 1)):
            workload = Workload(name=name, tokens=tokens, tiles=count, items=1)
            rows = self._rows(count) if count else None
            tiles = random_tiles(self.model, max(1, count), seed=0)
            batch = text_batch(self.model, workload, rows, seed=1)
            times = []
            for _ in range(30):
                started = time.perf_counter()
                if rows is not None:
                    self.vision.launch([tiles], [rows]).result()
                self.text.launch(batch).result()
                times.append(time.perf_counter() - started)
            self._add(name, 1, statistics.median(times[10:]), None)

    def _rows(self, tiles: int) -> torch.Tensor:
        return torch.empty(
            tiles * self.model.tokens_per_tile,
            self.model.hidden,
            dtype=self.placement.torch_dtype,
            device=self.placement.device,
        )

    def _steady(self, launch: Callable[[], Launched[object]], depth: int) -> float:
        """Seconds a batch takes while the next one is launched behind it, as a worker does."""
        flying: deque[Launched[object]] = deque(launch() for _ in range(depth))
        count, started = 0, time.perf_counter()
        while count < 3 or time.perf_counter() - started < self.duration:
            flying.popleft().result()
            flying.append(launch())
            count += 1
        taken = (time.perf_counter() - started) / count
        for launched in flying:
            launched.result()
        return taken

    def _bound(self, products: Iterable[Product]) -> float:
        total = 0.0
        for product in products:
            if product not in self._products:
                self._products[product] = seconds(product, self.placement.device, self.placement.torch_dtype)
            total += self._products[product]
        return total

    def _add(self, name: str, items: int, taken: float, bound: float | None) -> None:
        self.rows.append(
            (
                name,
                str(items),
                number(taken * 1e3),
                number(items / taken),
                number(items / bound if bound else None),
                number(100 * bound / taken if bound else None),
            )
        )
        print("  ".join(self.rows[-1]), flush=True)


def _timed(what: str, make: Callable[[], T]) -> T:
    started = time.perf_counter()
    made = make()
    print(f"{what}: {time.perf_counter() - started:.1f} s", flush=True)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    parser = usage.parser("benchmarks.engine", __doc__)
    parser.add_argument("--model-path", type=Path, help="a checkpoint; a random one by default")
    parser.add_argument("--size", choices=("tiny", "full"), default="full", help="of the random one")
    parser.add_argument("--config", type=Path, help="an engine config, for other engines and their budgets")
    parser.add_argument("--tokens", type=int, default=16384, help="the text engine's budget")
    parser.add_argument("--tiles", type=int, default=32, help="the vision engine's budget")
    parser.add_argument("--seconds", type=float, default=1.5, help="for each row")
    parser.add_argument("--out", type=Path, help="a directory for engine.csv")
    parser.add_argument("--no-check", action="store_true", help="skip the comparison with float32")
    parser.add_argument("--no-rates", action="store_true", help="skip the timed rows")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        path = options.model_path
        if path is None:
            path = Path(folder) / "model"
            make_checkpoint(["--out", str(path), "--size", options.size])
        _run(LlamaNemotronVL.open(path), options)
    return 0


def _run(model: LlamaNemotronVL, options: argparse.Namespace) -> None:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"torch {torch.__version__}, {device}")
    if options.size == "tiny":
        options.tokens, options.tiles = min(options.tokens, 256), min(options.tiles, 4)
    text = EngineSettings(max_batch_cost=options.tokens, max_queue_cost=options.tokens)
    vision = EngineSettings(max_batch_cost=options.tiles, max_queue_cost=options.tiles)
    if options.config is not None:
        stages = load_stages(options.config, None)
        text, vision = stages.text, stages.vision
        options.tokens, options.tiles = text.max_batch_cost, vision.max_batch_cost
    benchmark = Benchmark(model, text=text, vision=vision, duration=options.seconds)
    if not options.no_rates:
        _measure(benchmark, options)
    if not options.no_check:
        worst = text_cosine(model, benchmark.text, benchmark.placement)
        row = vision_cosine(model, benchmark.vision, benchmark.placement)
        print(f"worst cosine against float32: text {worst:.6f}, vision rows {row:.6f}")


def _measure(benchmark: Benchmark, options: argparse.Namespace) -> None:
    tile_seconds = 0.0
    for count in sorted({1, options.tiles // 4, options.tiles * 7 // 8, options.tiles} - {0}):
        tile_seconds = benchmark.run_vision(count)
    for workload in workloads(budget=options.tokens, small=options.size == "tiny"):
        benchmark.run_text(workload, tile_seconds)
    benchmark.run_latency()
    print("\n" + table(HEADER, benchmark.rows))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        write_csv(options.out / "engine.csv", HEADER, benchmark.rows)


if __name__ == "__main__":
    raise SystemExit(main())
