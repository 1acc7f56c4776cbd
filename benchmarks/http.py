"""``python -m benchmarks.http``: what a client sees, in a closed loop and, with ``--rate``, an open one.

Starts a service on this machine, or takes the URL of one, and drives each workload from processes of its
own. Every eighth answer is checked while the load runs: unit vectors or a score for each input, the same as
before for the same input. A request that fails or gives a wrong answer counts as an error and for nothing
else. Beside it stand the engines in process, fed with the batches of the workload for as long as it was
driven: they are measured just before on the same machine.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks import cpu, usage
from benchmarks.card import NOTHING, CardMeter, Reading
from benchmarks.checkpoint import add_model, made_checkpoint, usual_units
from benchmarks.in_process import Sustained, sustained
from benchmarks.service import Deployment, service
from tessera.models import Model, open_model
from tessera.models.base import OutputKind
from tessera_tools.load.bodies import EMBEDDING, SCORING, WORKLOADS, HttpWorkload
from tessera_tools.load.clients import Load, Outcome, drive
from tessera_tools.load.words import CheckpointWords
from tessera_tools.table import number, table, write_csv

HEADER = (
    "workload", "loop", "requests/s", "inputs/s", "p50 ms", "p90 ms", "p99 ms", "errors", "checked",
    "frontend cores", "worker cores", "decoder cores", "GPU %", "MHz", "W",
    "engine/s", "engine ms", "engine MHz", "engine W", "of engine %",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Beside:
    """What is known of a row besides its answers."""

    meter: cpu.Meter | None = None
    card: Reading = NOTHING
    engine: Sustained | None = None
    engine_card: Reading = NOTHING


class Window:
    """Implements ``load.clients.Watch``."""

    def __init__(self) -> None:
        self.meter = cpu.Meter()
        self.began = self.ended = 0.0

    def begin(self) -> None:
        self.began = time.time()
        self.meter.begin()

    def end(self) -> None:
        self.meter.end()
        self.ended = time.time()


def row(workload: HttpWorkload, loop: str, outcome: Outcome, beside: Beside) -> tuple[str, ...]:
    quantiles = outcome.quantiles(0.5, 0.9, 0.99)
    rate = outcome.inputs_rate
    meter, engine = beside.meter, beside.engine
    alone = engine and engine.latency
    share = rate / engine.rate if engine else None
    if alone and quantiles[0]:
        # One request at a time: its time counts, and the window holds few of them.
        share = alone * 1e3 / quantiles[0]
    cores = [meter and meter.cores(*names) for names in (("frontend",), cpu.WORKERS, ("decoders",))]
    return (
        workload.name,
        loop,
        number(outcome.requests_rate),
        number(rate),
        *map(number, quantiles),
        outcome.failed,
        str(outcome.checked),
        *map(number, cores),
        *map(number, (beside.card.busy, beside.card.mhz, beside.card.watts)),
        number(engine and engine.rate),
        number(alone and alone * 1e3),
        *map(number, (beside.engine_card.mhz, beside.engine_card.watts)),
        number(share and 100 * share),
    )


def add_shared(parser: argparse.ArgumentParser) -> None:
    """What every benchmark that starts a service and loads it asks for."""
    add_model(parser)
    parser.add_argument("--model-name", default="benchmark", help="the name that requests use")
    parser.add_argument("--frontends", type=int, default=1)
    parser.add_argument("--clients", type=int, default=2, help="client processes")
    parser.add_argument("--encoding", choices=("base64", "float"), default="base64", help="of the answers")
    parser.add_argument(
        "--warm", "--load-first", type=float, default=2.0, help="seconds of load before each window"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="the window")
    parser.add_argument("--threads", type=int, default=8, help="preprocessing threads of a worker")
    parser.add_argument("--tokens", type=int, default=16384, help="budget of a text batch")
    parser.add_argument("--units", type=int, help="budget of a vision batch, in tiles or patches")
    parser.add_argument("--cache-gb", type=float, default=4.0, help="cache of vision rows")
    parser.add_argument("--out", type=Path, default=Path("benchmarks-out"), help="CSV and logs")


def load(options: argparse.Namespace) -> Load:
    return Load(
        words=CheckpointWords(options.model_path),
        model_name=options.model_name,
        clients=options.clients,
        open_loop=options.rate is not None,
        warm=options.warm,
        seconds=options.seconds,
        encoding=options.encoding,
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = usage.parser("benchmarks.http", __doc__)
    parser.add_argument("--url", nargs="*", help="a running service; started here by default")
    parser.add_argument("--mode", choices=("agg", "e_p"), default="agg")
    parser.add_argument(
        "--workloads",
        nargs="*",
        default=[],
        metavar="NAME[@N,N]",
        help=f"with concurrencies or rates of their own behind the @; of {', '.join(WORKLOADS)}; by default "
        "all that embed, or those that score for a model that does nothing else",
    )
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8, 16, 32, 48, 64, 128])
    parser.add_argument("--rate", type=float, nargs="*", help="open loop: requests a second")
    parser.add_argument("--no-engine", action="store_true", help="skip the engines in process")
    add_shared(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, ...]] = []
    with ExitStack() as stack:
        options.model_path = made_checkpoint(
            options, Path(stack.enter_context(tempfile.TemporaryDirectory()))
        )
        model = open_model(options.model_path)
        options.units = options.units or usual_units(model)
        options.workloads = options.workloads or usual_workloads(model)
        chosen = chosen_workloads(options)
        card = stack.enter_context(CardMeter())
        engines: dict[tuple[str, int], Sustained] = {}
        if not options.url and not options.no_engine and options.rate is None:
            # Of this machine, so only where the service runs on it; and before it needs the card.
            engines = sustained(
                options.model_path,
                deployment(options).engine,
                [(workload, int(loop)) for workload, loops in chosen for loop in loops],
                warm=options.warm,
                seconds=options.seconds,
            )
        urls = tuple(options.url or ()) or stack.enter_context(
            service(deployment(options), options.out / "logs")
        )
        for workload, loops in chosen:
            for loop in loops:
                window = Window()
                outcome = drive(load(options), urls, workload, loop, window)
                engine = engines.get((workload.name, int(loop)))
                beside = Beside(
                    window.meter,
                    card.between(window.began, window.ended),
                    engine,
                    card.between(engine.begin, engine.end) if engine else NOTHING,
                )
                what = f"{loop:g} at once" if options.rate is None else f"{loop:g}/s"
                rows.append(row(workload, what, outcome, beside))
                print("  ".join(rows[-1]), flush=True)
                write_csv(options.out / "http.csv", HEADER, rows)
    print("\n" + table(HEADER, rows))
    return 0


def usual_workloads(model: Model) -> list[str]:
    """Those that the model's output and what it reads suit."""
    some = SCORING if model.output.kind is not OutputKind.VECTOR else EMBEDDING
    return [name for name, workload in some.items() if model.vision is not None or workload.size is None]


def chosen_workloads(options: argparse.Namespace) -> list[tuple[HttpWorkload, list[float]]]:
    usual: list[float] = options.concurrency if options.rate is None else options.rate
    found = []
    for choice in options.workloads:
        name, _, own = choice.partition("@")
        if name not in WORKLOADS:
            raise SystemExit(f"workload {name!r} is none of: {', '.join(WORKLOADS)}")
        found.append((WORKLOADS[name], [float(value) for value in own.split(",")] if own else usual))
    return found


def deployment(options: argparse.Namespace) -> Deployment:
    return Deployment(
        model_path=options.model_path,
        mode=options.mode,
        frontends=options.frontends,
        engine={
            "vision": {"max_batch_cost": options.units, "max_queue_cost": 128 * options.units},
            "text": {"max_batch_cost": options.tokens, "max_queue_cost": 4 << 20},
            "preprocess_threads": options.threads,
            # Of one torch operation on the CPU: on a GPU machine nothing there is worth a second one, and
            # idle ones spin.
            "threads": 1 if shutil.which("nvidia-smi") else 0,
        },
        worker_flags=("--multimodal-embedding-cache-capacity-gb", str(options.cache_gb)),
    )


if __name__ == "__main__":
    raise SystemExit(main())
