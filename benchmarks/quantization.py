"""``python -m benchmarks.quantization``: what FP8 gains and what it costs, by blocks left in bfloat16.

Retrieves with trained weights, in bfloat16, in FP8 with scales made as it runs, and in FP8 with
static scales that it calibrates before. On a card the engines compute, and their rates stand beside; on a CPU
the arithmetic alone is a card's.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from training.evaluate import World, word_queries
from training.world.grammar import describe

from benchmarks import usage
from benchmarks.card import CardMeter
from benchmarks.known_texts import KnownTexts, add_counts, known_texts
from benchmarks.products import text_tower, vision_tower
from benchmarks.recall import Embedded, Prompts, Retrieval, embedded, embedded_on_cpu, judged
from benchmarks.stages import CardStages, Precision, Rate
from tessera.models import Model, open_model
from tessera_engines.calibration import Calibration
from tessera_engines.quantize.command import Request, quantize
from tessera_tools.table import number, table, write_csv

HEADER = (
    *("model", "products", "blocks kept at each end", "per s", "x bf16", "J an input", "recall at 1"),
    *("recall at 10", "lost", "same of ten nearest", "worst cosine"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A row of the table; what was not measured is empty."""

    model: str
    products: str
    kept: str
    rate: str
    ratio: str
    joules: str
    first: str
    among: str
    lost: str
    overlap: str
    cosine: str

    def __str__(self) -> str:
        return "  ".join(filter(None, astuple(self)))


def precisions(path: Path, keep: Sequence[int], layers: int) -> list[Precision]:
    """bfloat16, and FP8 with so many of the layers left out at each end, as long as any is in FP8."""
    return [
        Precision(name="bfloat16", model=path),
        *(Precision(name="FP8, scales of rows", model=path, keep=one) for one in keep if 2 * one < layers),
    ]


def _kept(precision: Precision) -> str:
    return "all" if precision.keep is None else str(precision.keep)


def _free() -> None:
    # Loaded checkpoints are frozen out of the collector's sight.
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()


def recall(path: Path, folder: Path, options: argparse.Namespace) -> Iterator[Line]:
    """Retrieval by a trained model, of pictures if it sees; ``folder`` is for what is written on the way."""
    model = open_model(path)
    name = path.parent.name if path.name == "model" else path.name
    retrieval, calibration = _retrieval(model, options)
    print(f"{name}: {len(retrieval.items)} items, {len(retrieval.queries)} queries", flush=True)
    layers = text_tower(model).layers
    if model.vision is not None:
        layers = max(layers, vision_tower(model).layers)
    static, kept = _static(model, folder / name, calibration, options)
    every = [*precisions(path, options.keep, layers), static]
    measure = _on_card if options.device == "cuda" else _on_cpu
    base: tuple[Embedded, Rate | None] | None = None
    for precision, (found, rate) in zip(every, measure(model, every, retrieval, options), strict=True):
        base = base or (found, rate)
        of = judged(found, base[0], retrieval.own)
        yield Line(
            model=name,
            products=precision.name,
            kept=kept if precision.stored else _kept(precision),
            rate="" if rate is None else number(rate.per_second),
            ratio="" if rate is None or base[1] is None else f"{rate.per_second / base[1].per_second:.2f}",
            joules="" if rate is None or rate.joules is None else f"{rate.joules:.3g}",
            first=str(of.first),
            among=str(of.among),
            lost="" if found is base[0] else str(of.lost),
            overlap=f"{of.overlap:.4f}",
            cosine=f"{of.cosine:.5f}",
        )


def _on_card(
    model: Model, every: Sequence[Precision], retrieval: Retrieval, options: argparse.Namespace
) -> Iterator[tuple[Embedded, Rate | None]]:
    prompts = Prompts.of(model, retrieval)
    with CardMeter() as meter:
        for precision in every:
            _free()
            stages = CardStages(open_model(precision.model), precision)
            found = embedded(model, stages, prompts)
            rate = stages.rate(prompts.items, meter, options.seconds)
            stages.close()
            yield found, rate


def _on_cpu(
    model: Model, every: Sequence[Precision], retrieval: Retrieval, options: argparse.Namespace
) -> Iterator[tuple[Embedded, Rate | None]]:
    # Side by side on a thread each: two threads of one wait for each other on a busy machine.
    with ProcessPoolExecutor(options.processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        found = pool.map(embedded_on_cpu, every, [retrieval] * len(every))
        for precision, (each, seconds) in zip(every, found, strict=True):
            print(f"{precision.name}: {seconds:.0f} s of processor time", flush=True)
            yield each, None


def _static(
    model: Model, folder: Path, calibration: Sequence[str | bytes], options: argparse.Namespace
) -> tuple[Precision, str]:
    """Write the checkpoint with static scales; return it, and which layers are left out."""
    folder.mkdir()
    _write_source(folder / "source", calibration)
    request = Request(
        source=Calibration.read(folder / "source"),
        out=folder / "static",
        stages="text" if model.vision is None else "all",
        most_inputs=options.calibrate,
        most_loss=options.most_loss,
        device=options.device,
    )
    kept = []
    for stage, tower in quantize(model, request, lambda what: print(what, flush=True)).items():
        left = [layer.number for layer in tower.layers if layer.kept]
        print(f"{stage}: loss {tower.whole:.5f}, {tower.loss:.5f} without layers {left}", flush=True)
        kept.append(f"{stage} layers {' '.join(map(str, left))}" if left else "")
    precision = Precision(name="FP8, static", model=request.out, stored=True)
    return precision, ", ".join(filter(None, kept)) or "0"


def _retrieval(model: Model, options: argparse.Namespace) -> tuple[Retrieval, list[str | bytes]]:
    """Return what is searched, and inputs of the same kind to calibrate with, which are not in it."""
    if model.vision is not None:
        return _scenes(options.pictures)
    if options.texts is None:
        found = known_texts(options.passages + options.calibrate, options.queries, options.letters)
    else:
        found = KnownTexts.read(options.texts)
    end = len(found.passages) - options.calibrate
    searched, rest = found.passages[:end], found.passages[end:]
    return Retrieval(items=searched, queries=found.questions, own=np.arange(len(found.questions))), list(rest)


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
    parser.add_argument("--model-path", type=Path, required=True, nargs="+")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default=device, help="by default a card if there is"
    )
    parser.add_argument("--texts", type=Path, help="what benchmarks.known_texts wrote elsewhere")
    add_counts(parser)
    parser.add_argument("--pictures", type=int, default=600, help="for a model that sees")
    parser.add_argument("--most-loss", type=float, default=0.002, help="as tessera engine quantize has it")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each rate of a stage, on a card")
    parser.add_argument("--processes", type=int, default=3, help="on a CPU")
    parser.add_argument("--keep", type=int, nargs="+", default=[0, 1, 2, 4, 6], help="unquantized_blocks")
    parser.add_argument("--out", type=Path, help="a directory for quantization.csv")
    options = parser.parse_args(argv)
    on_card = options.device == "cuda"
    if on_card and (not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9)):
        raise SystemExit("FP8 products need a CUDA device of capability 8.9 or above")
    if not on_card:
        torch.set_num_threads(1)
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        for line in chain(*(recall(path, Path(folder), options) for path in options.model_path)):
            lines.append(line)
            print(line, flush=True)
            if options.out is not None:
                options.out.mkdir(parents=True, exist_ok=True)
                write_csv(options.out / "quantization.csv", HEADER, [astuple(each) for each in lines])
    print("\n" + table(HEADER, [astuple(each) for each in lines]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
