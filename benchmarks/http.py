"""``python -m benchmarks.http``: what a client sees, in a closed loop and, with ``--rate``, an open one.

Starts a service on this machine, or takes the URL of one, and drives each workload from processes of its
own. Every eighth answer is checked while the load runs: a unit vector for each input, the same as before
for the same input. A request that fails or gives a wrong answer counts as an error and for nothing else.
The bound is what the matrix products alone would allow, measured just before on the same machine.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks import usage
from benchmarks.bodies import WORKLOADS, HttpWorkload
from benchmarks.bound import bounds
from benchmarks.checkpoint import add_model, made_checkpoint, usual_units
from benchmarks.load import Load, Outcome, drive
from benchmarks.plot import Point, plot
from benchmarks.service import Deployment, service
from benchmarks.table import number, table, write_csv
from tessera.models import open_model

HEADER = (
    "workload", "loop", "requests/s", "inputs/s", "p50 ms", "p90 ms", "p99 ms", "errors", "checked", "GPU %",
    "bound %",
)  # fmt: skip


def row(
    workload: HttpWorkload,
    loop: str,
    outcome: Outcome,
    seconds: float,
    gpu: float | None,
    bound: float | None,
) -> tuple[str, ...]:
    """``bound`` is in inputs a second."""
    quantiles: list[float | None] = [None] * 3
    if outcome.latencies:
        quantiles = [float(found) * 1e3 for found in np.quantile(outcome.latencies, (0.5, 0.9, 0.99))]
    return (
        workload.name,
        loop,
        number(len(outcome.latencies) / seconds),
        number(outcome.inputs / seconds),
        *map(number, quantiles),
        " ".join(f"{times}x{why}" for why, times in outcome.errors.items()) or "0",
        str(outcome.checked),
        number(gpu),
        number(100 * outcome.inputs / seconds / bound if bound else None),
    )


class GpuMeter:
    """Mean utilisation as ``nvidia-smi`` reports it, or None where it is missing."""

    def __enter__(self) -> GpuMeter:
        self._process: subprocess.Popen[str] | None = None
        if shutil.which("nvidia-smi"):
            query = [
                "nvidia-smi",
                "--query-gpu=utilization.gpu",
                "--format=csv,noheader,nounits",
                "-lms",
                "250",
            ]
            self._process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.mean: float | None = None
        if self._process is not None:
            self._process.terminate()
            output, _ = self._process.communicate()
            samples = sorted(float(line) for line in output.split() if line.strip().isdigit())
            # The median over the run: clients that start up and wind down leave the card idle.
            self.mean = samples[len(samples) // 2] if samples else None


def add_shared(parser: argparse.ArgumentParser) -> None:
    """What every benchmark that starts a service and loads it asks for."""
    add_model(parser)
    parser.add_argument("--model-name", default="benchmark", help="the name that requests use")
    parser.add_argument("--frontends", type=int, default=1)
    parser.add_argument("--clients", type=int, default=2, help="client processes")
    parser.add_argument("--encoding", choices=("base64", "float"), default="base64", help="of the answers")
    parser.add_argument("--warm", type=float, default=2.0, help="seconds before the window")
    parser.add_argument("--seconds", type=float, default=10.0, help="the window")
    parser.add_argument("--threads", type=int, default=8, help="preprocessing threads of a worker")
    parser.add_argument("--tokens", type=int, default=16384, help="budget of a text batch")
    parser.add_argument("--units", type=int, help="budget of a vision batch, in tiles or patches")
    parser.add_argument("--cache-gb", type=float, default=4.0, help="cache of vision rows")
    parser.add_argument("--out", type=Path, default=Path("benchmarks-out"), help="CSV, plot and logs")


def load(options: argparse.Namespace) -> Load:
    return Load(
        model_path=options.model_path,
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
        default=list(WORKLOADS),
        metavar="NAME[@N,N]",
        help=f"with concurrencies or rates of their own behind the @; of {', '.join(WORKLOADS)}",
    )
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8, 16, 32, 48, 64, 128])
    parser.add_argument("--rate", type=float, nargs="*", help="open loop: requests a second")
    add_shared(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, ...]] = []
    points: list[Point] = []
    with ExitStack() as stack:
        options.model_path = made_checkpoint(
            options, Path(stack.enter_context(tempfile.TemporaryDirectory()))
        )
        options.units = options.units or usual_units(open_model(options.model_path))
        chosen = _chosen(options)
        bound: dict[str, float] = {}
        if not options.url:
            # Of this machine, so only where the service runs on it; and before it needs the card.
            bound = bounds(
                options.model_path,
                [workload for workload, _ in chosen],
                tokens=options.tokens,
                units=options.units,
            )
        urls = tuple(options.url or ()) or stack.enter_context(
            service(deployment(options), options.out / "logs")
        )
        for workload, loops in chosen:
            for loop in loops:
                with GpuMeter() as gpu:
                    outcome = drive(load(options), urls, workload, loop)
                what = f"{loop:g} at once" if options.rate is None else f"{loop:g}/s"
                rows.append(row(workload, what, outcome, options.seconds, gpu.mean, bound.get(workload.name)))
                print("  ".join(rows[-1]), flush=True)
                points.append(Point(workload.name, float(loop), len(outcome.latencies) / options.seconds))
    print("\n" + table(HEADER, rows))
    write_csv(options.out / "http.csv", HEADER, rows)
    plot(options.out / "http.png", points, "concurrency" if options.rate is None else "offered requests/s")
    return 0


def _chosen(options: argparse.Namespace) -> list[tuple[HttpWorkload, list[float]]]:
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
