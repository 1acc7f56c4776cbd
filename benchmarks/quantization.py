"""``python -m benchmarks.quantization``: what FP8 gains and what it costs.

``speed`` runs the engines on a card, by blocks left in bfloat16: rates and cosines are against the bfloat16
engines in the same run, on the same inputs. On random weights errors do not cancel as they do in a trained
network, so the cosines are a lower bound for real ones. ``recall`` runs trained weights on the CPU, in
bfloat16, in FP8 with scales made as it runs, and in FP8 with static scales that it calibrates before.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from training.evaluate import World, word_queries
from training.world.grammar import describe

from benchmarks import usage
from benchmarks.accuracy import texts
from benchmarks.batches import IMAGE, Workload, text_batch, vision_batch
from benchmarks.checkpoint import usual_units
from benchmarks.known_texts import known_texts
from benchmarks.products import median
from benchmarks.recall import Precision, Retrieval, embedded, interval, judged
from tessera.engine.batch import pack
from tessera.engine.placement import place
from tessera.engine.settings import EngineSettings
from tessera.engine.torch.text import TorchTextEngine
from tessera.engine.torch.vision import TorchVisionEngine
from tessera.models import Model, open_model
from tessera_engines.calibration import Calibration
from tessera_engines.quantize.command import Request, quantize
from tessera_tools.table import number, table, write_csv

HEADER = ("stage", "blocks kept at each end", "per s", "x bf16", "worst cosine", "median cosine")
RECALL_HEADER = ("products", "recall at 1", "recall at 10", "lost", "same of ten nearest", "worst cosine")
Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Measured:
    """Sequences or images a second, and the rows that were computed on the way."""

    rate: float
    rows: Rows


def _config(keep: int | None, budget: int) -> EngineSettings:
    return EngineSettings(
        max_batch_cost=budget,
        max_queue_cost=budget,
        quantization="none" if keep is None else "fp8",
        unquantized_blocks=keep or 0,
    )


def text(model: Model, keep: int | None, tokens: int) -> Measured:
    config = _config(keep, tokens)
    engine = TorchTextEngine(model, config, place(config))
    engine.warm()
    length = min(1024, tokens)
    items = tokens // length
    batch = text_batch(model, Workload(name="", tokens=length, items=items), None, seed=1)
    rows = np.concatenate([engine.launch(one).result().values for one in (pack(texts(model)), batch)])
    rate = items / _seconds(lambda: engine.launch(batch).result())
    engine.close()
    return Measured(rate, rows)


def vision(model: Model, keep: int | None, units: int) -> Measured:
    config = _config(keep, units)
    placement = place(config)
    engine = TorchVisionEngine(model, config, placement)
    engine.warm()
    assert model.vision is not None
    count = max(1, units // model.plan(*IMAGE, param="image").units)
    batch = vision_batch(model, [IMAGE] * count, seed=0)
    for image in batch.pixels[::2]:
        # Half of them smooth, as pages are, and half noise.
        image[:] = np.linspace(0, 255, image.shape[-1]).astype(np.uint8)
    out = torch.empty(
        sum(plan.rows for plan in batch.plans),
        model.vision.row_width,
        dtype=placement.torch_dtype,
        device=placement.device,
    )
    slots = torch.split(out, [plan.rows for plan in batch.plans])
    engine.launch(batch, slots).result()
    rows: Rows = out.float().cpu().numpy()
    rate = count / _seconds(lambda: engine.launch(batch, slots).result())
    engine.close()
    return Measured(rate, rows)


def _seconds(run: Callable[[], object]) -> float:
    """Long enough for the card to reach the clock that it can hold."""
    return median(run, "cuda", repeats=40, warm=20)


def _speed(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise SystemExit("FP8 products need a CUDA device of capability 8.9 or above")
    model = open_model(options.model_path)
    lines: list[tuple[str, ...]] = []
    for stage, measure, budget in (
        ("text, 1024 tokens", text, options.tokens),
        ("vision, images 512x512", vision, options.units or usual_units(model)),
    ):
        base = measure(model, None, budget)
        lines.append((stage, "all", number(base.rate), "1", "", ""))
        for keep in options.keep:
            gc.unfreeze()
            gc.collect()
            torch.cuda.empty_cache()
            found = measure(model, keep, budget)
            cosines = _cosines(found.rows, base.rows)
            worst, median = float(cosines.min()), float(np.median(cosines))
            lines.append(
                (
                    stage,
                    str(keep),
                    number(found.rate),
                    f"{found.rate / base.rate:.2f}",
                    f"{worst:.5f}",
                    f"{median:.5f}",
                )
            )
            print("  ".join(lines[-1]), flush=True)
    print("\n" + table(HEADER, lines))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        write_csv(options.out / "quantization.csv", HEADER, lines)
    return 0


def _cosines(found: Rows, expected: Rows) -> npt.NDArray[np.float64]:
    left, right = found.astype(np.float64), expected.astype(np.float64)
    products = np.einsum("ij,ij->i", left, right)
    cosines: npt.NDArray[np.float64] = products / (
        np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    )
    return cosines


def _recall(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    model = open_model(options.model_path)
    retrieval, calibration = _retrieval(model, options)
    lines: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _write_source(folder / "source", calibration)
        request = Request(
            source=Calibration.read(folder / "source"),
            out=folder / "static",
            stages="text" if model.vision is None else "all",
            most_inputs=options.calibrate,
            most_loss=options.most_loss,
        )
        print(f"{len(retrieval.items)} items, {len(retrieval.queries)} queries", flush=True)
        for stage, tower in quantize(model, request, lambda what: print(what, flush=True)).items():
            kept = [layer.number for layer in tower.layers if layer.kept]
            print(f"{stage}: loss {tower.whole:.5f}, {tower.loss:.5f} without layers {kept}", flush=True)
        precisions = (
            Precision(name="bfloat16", model=options.model_path),
            Precision(name="FP8, scales of rows", model=options.model_path, keep=options.keep_ends),
            Precision(name="FP8, static", model=request.out, stored=True),
        )
        # Side by side on a thread each: two threads of one wait for each other on a busy machine.
        with ProcessPoolExecutor(len(precisions), get_context("spawn"), torch.set_num_threads, (1,)) as pool:
            every = list(pool.map(embedded, precisions, [retrieval] * len(precisions)))
        base = every[0]
        for precision, found in zip(precisions, every, strict=True):
            of = judged(found, base, retrieval.own)
            low, high = interval(found, retrieval.own)
            lost = "" if found is base else f"{of.lost[0]:.4f} ({of.lost[1]:.4f} to {of.lost[2]:.4f})"
            lines.append(
                (
                    precision.name,
                    f"{of.first:.4f}",
                    f"{of.among:.4f} ({low:.4f} to {high:.4f})",
                    lost,
                    f"{of.overlap:.4f}",
                    f"{of.cosine:.5f}",
                )
            )
            print("  ".join(lines[-1]), f" {found.seconds:.0f} s", flush=True)
    print("\n" + table(RECALL_HEADER, lines))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        write_csv(options.out / "recall.csv", RECALL_HEADER, lines)
    return 0


def _retrieval(model: Model, options: argparse.Namespace) -> tuple[Retrieval, list[str | bytes]]:
    """Return what is searched, and inputs of the same kind to calibrate with, which are not in it."""
    if model.vision is not None:
        return _scenes(options.items)
    texts, questions, own = known_texts(options.items + options.calibrate, options.queries, options.letters)
    searched, rest = texts[: options.items], texts[options.items :]
    return Retrieval(items=searched, queries=questions, own=np.array(own)), list(rest)


def _scenes(count: int) -> tuple[Retrieval, list[str | bytes]]:
    """Pictures and pages that the demonstration model never saw, their captions, and words on the pages."""
    world = World.make(count, seed=3)
    captions = [describe(one, world.source) for one in world.compositions]
    asked, pages = word_queries(world.compositions, world.source)
    other = World.make(64, seed=4)
    calibration = [*other.images, *(describe(one, other.source) for one in other.compositions)]
    own = np.concatenate([np.arange(count), pages])
    return Retrieval(items=world.images, queries=[*captions, *asked], own=own), calibration


def _write_source(folder: Path, inputs: Sequence[str | bytes]) -> None:
    folder.mkdir()
    (folder / "texts.txt").write_text("\n".join(one for one in inputs if isinstance(one, str)))
    for position, one in enumerate(inputs):
        if isinstance(one, bytes):
            (folder / f"{position}{suffix_of(one)}").write_bytes(one)


def suffix_of(image: bytes) -> str:
    return ".png" if image.startswith(b"\x89PNG") else ".webp" if image[8:12] == b"WEBP" else ".jpg"


def main(argv: Sequence[str] | None = None) -> int:
    parser = usage.parser("benchmarks.quantization", __doc__)
    commands = parser.add_subparsers(required=True, metavar="WHAT")
    speed = commands.add_parser("speed", help="rates on a card")
    speed.add_argument("--keep", type=int, nargs="+", default=[0, 1, 2, 4, 6])
    speed.add_argument("--tokens", type=int, default=16384)
    speed.add_argument("--units", type=int, help="of a vision batch, tiles or patches")
    speed.set_defaults(run=_speed)
    recall = commands.add_parser("recall", help="retrieval with trained weights, on the CPU")
    recall.add_argument("--items", type=int, default=20_000, help="texts, or pictures for a model of both")
    recall.add_argument("--queries", type=int, default=5_000, help="for texts")
    recall.add_argument("--letters", type=int, default=80, help="of a text, at most")
    recall.add_argument("--calibrate", type=int, default=64, help="inputs, none of them among the items")
    recall.add_argument("--most-loss", type=float, default=0.002, help="as tessera engine quantize has it")
    recall.add_argument("--keep-ends", type=int, default=1, help="unquantized_blocks of scales of rows")
    recall.set_defaults(run=_recall)
    for each in (speed, recall):
        each.add_argument("--model-path", type=Path, required=True)
        each.add_argument("--out", type=Path, help="a directory for a CSV file")
    options = parser.parse_args(argv)
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
