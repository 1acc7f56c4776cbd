"""``python -m benchmarks.overhead``: what the service costs around engines that cost nothing.

The first row calls the engines in process. Every other one goes through HTTP, one frontend and one worker of
each kind; images are never seen before, 1 MiB of rows each. A hop is what a path takes beyond the one with
a hop less: HTTP and the embed worker beyond the process, an encode worker beyond the aggregated one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image

from benchmarks import usage
from benchmarks.free_family import FreeModel, installed
from benchmarks.service import Deployment, service
from tessera.engine.batch import PackedInput, pack, pack_images
from tessera.engine.placement import place
from tessera.engine.settings import EngineSettings
from tessera.engine.torch.text import TorchTextEngine
from tessera.engine.torch.vision import TorchVisionEngine
from tessera.imaging import Picture
from tessera.models.base import Content, Int32Array, Part, Truncate
from tessera_tools.load.bodies import HttpWorkload, jpeg
from tessera_tools.load.clients import Load, drive
from tessera_tools.load.words import CheckpointWords
from tessera_tools.table import number, table, write_csv

HEADER = ("path", "input", "p50 ms alone", "ms per hop", "requests/s", "p50 ms under load")
TEXT = HttpWorkload(name="text", tokens=32)
IMAGE = HttpWorkload(name="image", size=(512, 512))


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, ...]] = []
    with installed() as checkpoint:
        options.model_path = checkpoint
        base = {workload.name: _in_process(FreeModel(checkpoint), workload) for workload in (TEXT, IMAGE)}
        rows += [
            ("in process", name, number(seconds * 1e3), "-", number(1 / seconds), "-")
            for name, seconds in base.items()
        ]
        fewer = _deployed(options, "aggregated", "agg", None, (TEXT, IMAGE), base, rows)
        for transport in options.transports:
            _deployed(options, f"encode + embed, {transport}", "e_p", transport, (IMAGE,), fewer, rows)
    print(table(HEADER, rows))
    write_csv(options.out / "overhead.csv", HEADER, rows)
    return 0


def _deployed(
    options: argparse.Namespace,
    name: str,
    mode: str,
    transport: str | None,
    workloads: Sequence[HttpWorkload],
    fewer: dict[str, float],
    rows: list[tuple[str, ...]],
) -> dict[str, float]:
    device = "cuda" if transport == "cuda_ipc" else "cpu"
    stage = {"device": device, "dtype": "bfloat16", "graph_cost": 0}
    engine: dict[str, object] = {
        "vision": {**stage, "max_batch_cost": 28, "max_queue_cost": 4096},
        "text": {**stage, "max_batch_cost": 16384, "max_queue_cost": 4 << 20},
        "threads": 1,
    }
    if transport is not None:
        engine["transport"] = {"kind": transport}
    flags = ("--multimodal-embedding-cache-capacity-gb", "0")
    deployment = Deployment(model_path=options.model_path, mode=mode, engine=engine, worker_flags=flags)
    medians: dict[str, float] = {}
    load = Load(
        words=CheckpointWords(options.model_path),
        model_name="benchmark",
        clients=options.clients,
        warm=options.warm,
        seconds=options.seconds,
    )
    with service(deployment, options.out / "logs") as urls:
        for workload in workloads:
            alone = drive(load, urls, workload, 1.0)
            loaded = drive(load, urls, workload, float(options.concurrency))
            if alone.errors or loaded.errors:
                raise SystemExit(f"{name}, {workload.name}: {alone.errors} {loaded.errors}")
            medians[workload.name] = statistics.median(alone.latencies)
            rows.append(
                (
                    name,
                    workload.name,
                    number(medians[workload.name] * 1e3),
                    number((medians[workload.name] - fewer[workload.name]) * 1e3),
                    number(loaded.requests_rate),
                    number(statistics.median(loaded.latencies) * 1e3),
                )
            )
            print("  ".join(rows[-1]), flush=True)
    return medians


def _in_process(model: FreeModel, workload: HttpWorkload) -> float:
    """Seconds for one input: prompt, vision engine, text engine."""
    config = EngineSettings(max_batch_cost=8192, max_queue_cost=8192, device="cpu", dtype="bfloat16")
    placement = place(config)
    text, vision = TorchTextEngine(model, config, placement), TorchVisionEngine(model, config, placement)
    run = _text_only(model, text) if workload.size is None else _with_image(model, text, vision)
    times = []
    for _ in range(200):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _prompt(model: FreeModel, *parts: Part) -> Int32Array:
    content = Content(parts=parts)
    return model.prompt(content, max_tokens=8192, truncate=Truncate.NONE, param="input").tokens


def _text_only(model: FreeModel, engine: TorchTextEngine) -> Callable[[], object]:
    def run() -> object:
        tokens = _prompt(model, "word " * 32)
        return engine.launch(
            pack([PackedInput(tokens=tokens, positions=model.positions(tokens, ()))])
        ).result()

    return run


def _with_image(model: FreeModel, text: TorchTextEngine, vision: TorchVisionEngine) -> Callable[[], object]:
    import torch

    out = torch.empty(model.vision.max_rows, model.vision.row_width, dtype=torch.bfloat16)

    image = jpeg(Image.new("RGB", (512, 512)))

    def run() -> object:
        pixels = model.preprocess(Picture(image, param="input"))
        vision.launch(pack_images([pixels], [model.unit_positions(pixels.plan)]), [out]).result()
        tokens = _prompt(model, pixels.plan, "a page")
        packed = PackedInput(
            tokens=tokens,
            positions=model.positions(tokens, (pixels.plan,)),
            vision=(out,),
            vision_index=model.vision_index(tokens),
        )
        return text.launch(pack([packed])).result()

    return run


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = usage.parser("benchmarks.overhead", __doc__)
    parser.add_argument(
        "--transports", nargs="*", default=["inline", "shm", "nixl"], help="also cuda_ipc, with a card"
    )
    parser.add_argument("--concurrency", type=int, default=64, help="under load")
    parser.add_argument("--clients", type=int, default=2, help="client processes")
    parser.add_argument("--warm", type=float, default=1.0, help="seconds before the window")
    parser.add_argument("--seconds", type=float, default=4.0, help="the window")
    parser.add_argument("--out", type=Path, default=Path("benchmarks-out"), help="CSV and logs")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
