"""``python -m benchmarks.quantization``: what FP8 gains and what it costs, by blocks left in bfloat16.

Rates and cosines are against the bfloat16 engines in the same run, on the same inputs. On random weights
errors do not cancel as they do in a trained network, so the cosines are a lower bound for real ones.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import usage
from benchmarks.accuracy import texts
from benchmarks.batches import IMAGE, Workload, text_batch, vision_batch
from benchmarks.checkpoint import usual_units
from benchmarks.products import median
from tessera.engine.batch import pack
from tessera.engine.placement import place
from tessera.engine.settings import EngineSettings
from tessera.engine.torch.text import TorchTextEngine
from tessera.engine.torch.vision import TorchVisionEngine
from tessera.models import Model, open_model
from tessera_tools.table import number, table, write_csv

HEADER = ("stage", "blocks kept at each end", "per s", "x bf16", "worst cosine", "median cosine")
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = usage.parser("benchmarks.quantization", __doc__)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--keep", type=int, nargs="+", default=[0, 1, 2, 4, 6])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--units", type=int, help="of a vision batch, tiles or patches")
    parser.add_argument("--out", type=Path, help="a directory for quantization.csv")
    options = parser.parse_args(argv)
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


if __name__ == "__main__":
    raise SystemExit(main())
