"""``python -m benchmarks.overload``: several times more requests than the service can answer, open loop.

Measures what the service can do in a closed loop, sends ``--factor`` times as much for ``--seconds``, and
looks at what is left of its capacity, how fast the rest is refused, whether its processes grow, and how soon
it answers everything again. The capacity is measured once more in the end, since a machine that others use
too is not as fast from one minute to the next: what is left is a share of both together. Both are counted by
the answers that come from one second after the first request on and before the last one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks import cpu, usage
from benchmarks.open_loop import Answers, Flood, flood
from benchmarks.proc import children
from benchmarks.service import Deployment, service
from tessera_tools.load.clients import divided
from tessera_tools.random_checkpoint.checkpoint import main as make_checkpoint
from tessera_tools.table import table

# Seconds; a part that costs less is not shown.
_LEAST_COST = 1e-4
# Seconds that client processes are given to start, and to learn of their next part.
_CLIENTS_START, _AHEAD = 2.0, 0.3
# Of every part, before answers are counted: the first ones take as long as the queue.
_RAMP = 1.0
_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """``capacity`` and ``goodput`` in requests a second, the rest in seconds and MiB.

    The processor time of a good answer, by process and part, calm and in the storm, shows what overload costs
    also on a machine whose other jobs take from both.
    """

    capacity: float
    offered: float
    goodput: float
    refused: int
    failed: dict[str, int]
    unsent: int
    without_retry_after: int
    good_p50: float
    good_p99: float
    refused_p50: float
    refused_p99: float
    memory_before: float
    memory_half: float
    memory_after: float
    recovery: float
    calm_cost: dict[str, float]
    storm_cost: dict[str, float]
    storm_cores: tuple[float, ...]

    @property
    def cost_share(self) -> float:
        """What a good answer costs all processes when it is calm, as a share of what it costs in the storm.

        Where the processors are the limit it is the share of the capacity that is left.
        """
        return sum(self.calm_cost.values()) / sum(self.storm_cost.values())

    def rows(self) -> list[tuple[str, ...]]:
        return [
            ("capacity, requests/s", f"{self.capacity:.1f}"),
            ("offered, requests/s", f"{self.offered:.1f}"),
            ("goodput, requests/s", f"{self.goodput:.1f}"),
            ("goodput of capacity, %", f"{100 * self.goodput / self.capacity:.1f}"),
            ("answered 429", f"{self.refused}"),
            ("of these without Retry-After", f"{self.without_retry_after}"),
            ("failed otherwise", ", ".join(f"{n} {why}" for why, n in self.failed.items()) or "0"),
            ("not sent, too many unanswered", f"{self.unsent}"),
            ("good answers, p50 / p99 ms", f"{self.good_p50 * 1e3:.0f} / {self.good_p99 * 1e3:.0f}"),
            ("refusals, p50 / p99 ms", f"{self.refused_p50 * 1e3:.1f} / {self.refused_p99 * 1e3:.1f}"),
            (
                "memory before / half-way / after, MiB",
                f"{self.memory_before:.0f} / {self.memory_half:.0f} / {self.memory_after:.0f}",
            ),
            ("cost of a good answer, calm / storm, %", f"{100 * self.cost_share:.1f}"),
            *(
                (f"CPU of a good answer, {part}, calm / storm, ms", f"{before * 1e3:.2f} / {after * 1e3:.2f}")
                for part, before, after in (
                    (part, self.calm_cost.get(part, 0.0), after) for part, after in self.storm_cost.items()
                )
                if max(before, after) > _LEAST_COST
            ),
            (
                "cores used in the storm, worker / frontends / clients",
                " / ".join(f"{share:.2f}" for share in self.storm_cores),
            ),
            ("first second without a refusal, s after the end", f"{self.recovery:.1f}"),
        ]


class Meter(cpu.Meter):
    """The service's parts, and the client processes of this one."""

    def begin(self) -> None:
        super().begin()
        self._clients = cpu.seconds(self._client_pids())

    def end(self) -> None:
        super().end()
        self.clients = cpu.seconds(self._client_pids()) - self._clients

    def _client_pids(self) -> set[int]:
        return set(children(os.getpid())) - set(cpu.service_processes(os.getpid()))

    def of(self, *processes: str) -> float:
        """Processor seconds."""
        return sum(spent for (process, _), spent in self.spent.items() if process in processes)


class Memory(threading.Thread):
    """The resident memory of the service's processes, sampled while it runs."""

    def __init__(self, pids: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self._pids = pids
        self._over = threading.Event()
        self.samples: list[float] = []

    def run(self) -> None:
        while not self._over.is_set():
            self.samples.append(sum(_resident(pid) for pid in self._pids))
            self._over.wait(0.5)

    def stop(self) -> None:
        self._over.set()
        self.join()


def _resident(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_MB
    except OSError:
        return 0.0


def measure(options: argparse.Namespace, urls: tuple[str, ...]) -> Report:
    pids = list(cpu.service_processes(os.getpid()))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.clients, mp_context=context) as pool:

        def run(seconds: float, *, rate: float = 0.0, concurrency: int = 0, ahead: float = _AHEAD) -> Answers:
            start = time.time() + ahead
            # A process without a loop of its own would take its part for an open one.
            clients = min(options.clients, concurrency) if concurrency else options.clients
            plans = [
                Flood(
                    urls=urls[number % len(urls) :] + urls[: number % len(urls)],
                    model_name=options.model_name,
                    inputs=options.inputs,
                    words=options.words,
                    rate=rate / clients,
                    concurrency=divided(concurrency, clients, number),
                    start=start,
                    seconds=seconds,
                    seed=number,
                )
                for number in range(clients)
            ]
            joined = Answers()
            for answers in pool.map(flood, plans):
                joined.join(answers)
            return joined

        # The first run warms what is made on first use, on both sides.
        run(options.warm, concurrency=options.concurrency, ahead=_CLIENTS_START)
        calms: list[tuple[Meter, Answers]] = []

        def calm() -> float:
            """The service's capacity in requests a second."""
            meter = Meter()
            meter.begin()
            begun = time.time() + _AHEAD
            answers = run(options.calm, concurrency=options.concurrency)
            meter.end()
            calms.append((meter, answers))
            return len(_within(answers, begun, options.calm)) / (options.calm - _RAMP)

        storm_meter = Meter()
        before = calm()
        memory = Memory(pids)
        memory.start()
        begun = time.time() + _AHEAD
        storm_meter.begin()
        storm = run(options.seconds, rate=options.factor * before)
        storm_meter.end()
        memory.stop()
        ended = time.time()
        after = run(options.calm, rate=0.5 * before)
        capacity = (before + calm()) / 2
    good = _within(storm, begun, options.seconds)
    halves = memory.samples or [0.0]
    return Report(
        capacity=capacity,
        offered=(len(storm.good) + len(storm.refused) + sum(storm.failed.values())) / options.seconds,
        goodput=len(good) / (options.seconds - _RAMP),
        refused=len(storm.refused),
        failed=storm.failed,
        unsent=storm.late,
        without_retry_after=storm.without_retry_after,
        good_p50=_percentile(good, 0.5),
        good_p99=_percentile(good, 0.99),
        refused_p50=_percentile([seconds for _, seconds in storm.refused], 0.5),
        refused_p99=_percentile([seconds for _, seconds in storm.refused], 0.99),
        memory_before=halves[0],
        memory_half=halves[len(halves) // 2],
        memory_after=halves[-1],
        recovery=max([at - ended for at, _ in after.refused], default=0.0),
        calm_cost=_cost(calms),
        storm_cost=_cost([(storm_meter, storm)]),
        storm_cores=tuple(
            seconds / storm_meter.seconds
            for seconds in (storm_meter.of(*cpu.WORKERS), storm_meter.of("frontend"), storm_meter.clients)
        ),
    )


def _within(answers: Answers, begun: float, seconds: float) -> list[float]:
    """What the good answers took that came while requests were sent and the queue was full."""
    return [took for at, took in answers.good if begun + _RAMP <= at <= begun + seconds]


def _cost(runs: Sequence[tuple[Meter, Answers]]) -> dict[str, float]:
    """Processor seconds of a good answer, by process and part; the clients are one."""
    good = max(1, sum(len(answers.good) for _, answers in runs))
    found: dict[str, float] = {}
    for meter, _ in runs:
        parts = {f"{process}, {part}": spent for (process, part), spent in meter.spent.items()}
        for part, spent in (parts | {"clients": meter.clients}).items():
            found[part] = found.get(part, 0.0) + spent / good
    return found


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else float("nan")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = usage.parser("benchmarks.overload", __doc__)
    parser.add_argument("--model-path", type=Path, help="a checkpoint; a random one by default")
    parser.add_argument("--size", choices=("tiny", "full"), default="tiny", help="of the random checkpoint")
    parser.add_argument("--model-name", default="benchmark")
    parser.add_argument("--frontends", type=int, default=1)
    parser.add_argument("--clients", type=int, default=1, help="client processes")
    parser.add_argument("--inputs", type=int, default=16, help="texts in a request")
    parser.add_argument("--words", type=int, default=100, help="words in a text")
    parser.add_argument(
        "--concurrency", type=int, default=16, help="of the closed loop that finds the capacity"
    )
    parser.add_argument("--factor", type=float, default=10.0, help="of the capacity that is offered")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--warm", type=float, default=3.0)
    parser.add_argument("--calm", type=float, default=8.0, help="seconds for capacity, and for the recovery")
    parser.add_argument("--out", type=Path, help="a folder for the logs")
    parser.add_argument("--tokens", type=int, default=8192, help="budget of a text batch")
    options = parser.parse_args(argv)
    if min(options.seconds, options.calm) <= _RAMP:
        parser.error(f"--seconds and --calm must be more than {_RAMP:g}")
    return options


def main(argv: Sequence[str] | None = None) -> Report:
    options = parse(argv)
    with ExitStack() as stack:
        if options.model_path is None:
            options.model_path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
            make_checkpoint(["--out", str(options.model_path), "--size", options.size])
        logs = options.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        deployment = Deployment(
            model_path=options.model_path,
            frontends=options.frontends,
            engine={"text": {"max_batch_cost": options.tokens, "max_queue_cost": 32 * options.tokens}},
            frontend_flags=(),
        )
        report = measure(options, stack.enter_context(service(deployment, logs)))
    print(table(("overload", ""), report.rows()))
    return report


if __name__ == "__main__":
    main()
