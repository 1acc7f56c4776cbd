"""``python -m benchmarks.cost``: processor milliseconds of a request, by process and by part of it.

The engines cost nothing, so that what is left is the service. The floor is measured in the same run: an empty
ASGI application, the tokenizer, and one empty call over Dynamo; and beside it a bare service, which takes
texts to vectors and does nothing else. Each input is sent alone and then with
``--concurrency`` requests at once; images are never seen before. A part is the threads of one name.
``--against`` compares with another commit, in place of the floor: a service of each is there at once, and
this one drives them in turns, A B B A, window by window, because a machine differs from minute to minute by a
third. Starts of one commit differ by several per cent, which no window of theirs tells: each of ``--starts``
pairs is one share, begun with this commit and with the other in turns, and ``+-`` is between them.
``--instructions`` and ``--bytecodes`` count those of a frontend instead, or ``--of`` a worker, for one
request at a time, in turns as well: what decides where others use the machine. Each commit has the stand-ins
of its own benchmarks.
"""

from __future__ import annotations

import argparse
import http.client
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final

from benchmarks import cpu, usage
from benchmarks.checkpoint import add_vocabulary
from benchmarks.counting import Bytecodes, Counter, Instructions
from benchmarks.free_family import DESCRIBED, USUAL, installed
from benchmarks.ports import free_ports
from benchmarks.service import NAME, Deployment, service
from tessera_tools.load.bodies import Bodies, Body, HttpWorkload
from tessera_tools.load.clients import Load, drive
from tessera_tools.load.words import CheckpointWords
from tessera_tools.table import number, table, write_csv

WORKLOADS: Final = {
    workload.name: workload
    for workload in (
        HttpWorkload(name="text-32", tokens=32),
        HttpWorkload(name="text-128", tokens=128),
        HttpWorkload(name="text-1280", tokens=1280),
        HttpWorkload(name="tile", size=(512, 512)),
        HttpWorkload(name="image", size=(512, 512), alone=True),
    )
}
_USUAL_INPUTS: Final = ("text-32", "text-128", "tile")
_ROOT: Final = Path(__file__).parent.parent
_FLOOR: Final = "floor"
_BARE: Final = "bare"
_STARTS_SECONDS: Final = 60.0
# A part of less than this share of a request's processor time is one of the others.
_LEAST_SHARE: Final = 0.01
_MOST_FUNCTIONS: Final = 30
# Before anything is counted.
_FIRST_REQUESTS: Final = 40
# Of a frontend under valgrind.
_SLOW_START_SECONDS: Final = 400.0


@dataclass(slots=True)
class Cost:
    """Of one input at one concurrency: latencies in seconds, and processor seconds by process and part.

    ``starts`` has the processor seconds of a request of each start.
    """

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    spent: cpu.Parts = field(default_factory=dict)

    def add(self, seconds: float, latencies: Sequence[float], spent: cpu.Parts) -> None:
        self.seconds += seconds
        self.latencies += latencies
        for part, more in spent.items():
            self.spent[part] = self.spent.get(part, 0.0) + more

    @property
    def p50(self) -> float:
        return statistics.median(self.latencies)

    @property
    def requests(self) -> float:
        """Requests a second."""
        return len(self.latencies) / self.seconds

    def each(self, seconds: float) -> float:
        return seconds / len(self.latencies)

    @property
    def processor(self) -> float:
        """Seconds a request."""
        return self.each(sum(self.spent.values()))


Costs = dict[tuple[str, int], Cost]
"""By input and concurrency."""


@dataclass(frozen=True, slots=True)
class Running:
    """A service that runs: its name in tables, its frontends' URLs, and its processes by what they are."""

    name: str
    urls: Sequence[str]
    processes: dict[int, str]


def measure(
    options: argparse.Namespace, load: Load, services: Sequence[Running], costs: dict[str, Costs]
) -> None:
    """Add what the services cost, each input in turns; raises ``RuntimeError`` when one refuses a request."""
    for name, loop in ((name, loop) for name in options.inputs for loop in (1, options.concurrency)):
        for each in services:
            meter = cpu.Meter(each.processes)
            outcome = drive(load, each.urls, WORKLOADS[name], loop, meter)
            if outcome.errors or not outcome.latencies:
                raise RuntimeError(f"{name}, {loop} at once: {outcome.errors or 'no answer'}")
            cost = costs.setdefault(each.name, {}).setdefault((name, loop), Cost())
            cost.add(outcome.seconds, outcome.latencies, meter.spent)
            print(f"  {each.name}: {name}, {loop} at once: {outcome.requests_rate:.0f}/s", flush=True)


def _measure_start(
    options: argparse.Namespace, load: Load, sides: Iterable[tuple[str, Deployment]], turns: int
) -> dict[str, Costs]:
    """Return what services cost that are started for it and driven in turns."""
    found: dict[str, Costs] = {}
    with ExitStack() as stack:
        running: list[Running] = []
        for name, deployment in sides:
            others = cpu.service_processes(os.getpid())
            urls = stack.enter_context(service(deployment, options.out / "logs" / name.replace(" ", "-")))
            own = {pid: what for pid, what in cpu.service_processes(os.getpid()).items() if pid not in others}
            running.append(Running(name, urls, own))
        for turn in range(turns):
            measure(options, load, running[:: -1 if turn % 2 else 1], found)
    return found


def _measure_floors(
    options: argparse.Namespace, load: Load, checkpoint: Path, services: dict[str, Costs]
) -> None:
    tokenizer = checkpoint / DESCRIBED / "tokenizer.json"
    for name, bare in ((_FLOOR, False), (_BARE, True)):
        print(name, flush=True)
        found: dict[str, Costs] = {}
        with floor(tokenizer, options.frontends, options.out / "logs", bare=bare) as urls:
            least = Running(name, urls, cpu.service_processes(os.getpid()))
            measure(options, replace(load, check=False), [least], found)
        _add(services, found)


def _add(services: dict[str, Costs], found: Mapping[str, Costs]) -> None:
    """Add what was found in one start."""
    for name, costs in found.items():
        for column, cost in costs.items():
            total = services.setdefault(name, {}).setdefault(column, Cost())
            total.add(cost.seconds, cost.latencies, cost.spent)
            total.starts.append(cost.processor)


def _share(found: Sequence[float], first: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the shares, each of its own turn or pair, and twice its standard error."""
    shares = [value / other for value, other in zip(found, first, strict=True)]
    error = 2 * statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else math.nan
    return statistics.mean(shares), error


@contextmanager
def floor(tokenizer: Path, frontends: int, logs: Path, *, bare: bool = False) -> Iterator[tuple[str, ...]]:
    """The URLs of the least service there can be, or of one that is ``bare``."""
    logs.mkdir(parents=True, exist_ok=True)
    ports = free_ports(frontends)
    command = [sys.executable, "-m", "benchmarks.floor", *(["--bare"] if bare else [])]
    commands = [[*command, "worker"]] + [
        [*command, "frontend", "--port", str(port), "--tokenizer", str(tokenizer)] for port in ports
    ]
    processes = []
    with tempfile.TemporaryDirectory() as store, (logs / "floor.log").open("wb") as log:
        environment = os.environ | {"DYN_FILE_KV": store}
        try:
            for each in commands:
                processes.append(
                    subprocess.Popen(each, env=environment, stdout=log, stderr=subprocess.STDOUT)
                )
            for port in ports:
                _wait(port, processes)
            yield tuple(f"http://127.0.0.1:{port}" for port in ports)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _wait(port: int, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _STARTS_SECONDS
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return
        except OSError:
            if any(process.poll() is not None for process in processes) or time.monotonic() > deadline:
                raise RuntimeError("the floor does not start; see floor.log") from None
            time.sleep(0.1)


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """The working tree of another commit, for as long as it is compared with."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(_ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            # What is compiled lies in the source tree.
            build = [sys.executable, "-c", "import setuptools; setuptools.setup()", "build_ext", "--inplace"]
            subprocess.run(build, cwd=tree, check=True, capture_output=True)
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def _deployment(options: argparse.Namespace, checkpoint: Path) -> Deployment:
    stage: dict[str, object] = {"device": "cpu", "dtype": "bfloat16", "graph_cost": 0}
    return Deployment(
        model_path=checkpoint,
        mode=options.mode,
        frontends=options.frontends,
        # Both sides alike: another commit has other seats, and with one to count takes a text 6 % more steps.
        together=options.against is None,
        engine={
            "vision": {**stage, "max_batch_cost": 28, "max_queue_cost": 4096},
            "text": {**stage, "max_batch_cost": 16384, "max_queue_cost": 4 << 20},
            "preprocess": "processes",
            "preprocess_threads": options.decoders,
            "threads": 1,
        },
        worker_flags=("--multimodal-embedding-cache-capacity-gb", "0"),
    )


def _rows(services: dict[str, Costs]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A row for each input, concurrency and service; shares are of the first service."""
    against, first = next(iter(services.items()))
    shares = (f"p50 / {against}", f"CPU / {against}", "+-")
    header = ("input", "at once", "service", "p50 ms", "requests/s", "CPU ms", *shares)
    rows: list[tuple[str, ...]] = []
    for column, other in first.items():
        for name, costs in services.items():
            cost = costs[column]
            share = cost.processor / other.processor, math.nan
            # The floor starts once.
            if len(cost.starts) == len(other.starts):
                share = _share(cost.starts, other.starts)
            values = (cost.p50 * 1e3, cost.requests, cost.processor * 1e3, cost.p50 / other.p50, *share)
            rows.append((column[0], str(column[1]), name, *map(number, values)))
    return header, rows


def _parts(costs: Costs) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A column for each input and concurrency, in milliseconds a request."""
    columns = list(costs)
    header = ("process", "part", *(f"{name} @{loop}" for name, loop in columns))
    shown = {
        key: None
        for cost in costs.values()
        for key, spent in sorted(cost.spent.items())
        if spent >= _LEAST_SHARE * sum(cost.spent.values())
    }
    rows: list[tuple[str, ...]] = []
    for process in sorted({process for process, _ in shown}):
        of_it = [key for key in shown if key[0] == process]
        sums = [
            sum(spent for key, spent in costs[column].spent.items() if key[0] == process)
            for column in columns
        ]
        rows.append((process, "", *(_ms(costs[c], spent) for c, spent in zip(columns, sums, strict=True))))
        for key in of_it:
            rows.append(
                ("", key[1], *(_ms(costs[column], costs[column].spent.get(key, 0.0)) for column in columns))
            )
        rest = [
            spent - sum(costs[c].spent.get(key, 0.0) for key in of_it)
            for c, spent in zip(columns, sums, strict=True)
        ]
        rows.append(("", "others", *(_ms(costs[c], spent) for c, spent in zip(columns, rest, strict=True))))
    return header, rows


def _ms(cost: Cost, spent: float) -> str:
    return f"{cost.each(spent) * 1e3:.3f}"


def _count(options: argparse.Namespace, kind: type[Counter], requests: int) -> None:
    """Count what a request has the frontend do, or the worker; commits are counted in turns."""
    with ExitStack() as stack:
        checkpoint = stack.enter_context(installed(family=options.family))
        new = replace(_deployment(options, checkpoint), frontends=1)
        services = {"this": new}
        if options.against is not None:
            old = replace(new, tree=stack.enter_context(worktree(options.against)))
            services = {options.against: old, "this": new}
        counted: dict[str, _Counted] = {}
        for name, deployment in services.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            slow = replace(deployment, before={options.of: kind.command(folder)})
            (url,) = stack.enter_context(
                service(slow, options.out / "logs" / name, timeout=_SLOW_START_SECONDS)
            )
            counted[name] = _Counted(kind(folder, options.of), url)
        rows: list[tuple[str, ...]] = []
        words = CheckpointWords(checkpoint)
        for each in options.inputs:
            bodies = iter(Bodies(WORKLOADS[each], words, NAME, seed=0, encoding=options.encoding))
            counts: dict[str, list[float]] = {name: [] for name in counted}
            # The same for both: how many words are new differs between bodies.
            first_bodies = list(islice(bodies, _FIRST_REQUESTS))
            for one in counted.values():
                one.send(first_bodies)
            for turn in range(options.counts):
                sent = list(islice(bodies, requests))
                # A B B A: what a frontend does more of as it grows older is no difference between the two.
                for name in sorted(counted, reverse=turn % 2 == 1):
                    counts[name].append(counted[name].count(sent))
                    print(each, name, f"{counts[name][-1]:.4f}", flush=True)
            first = next(iter(counts.values()))
            for name, found in counts.items():
                figures = (min(found), statistics.median(found), max(found), *_share(found, first))
                rows.append((each, name, *(f"{figure:.4f}" for figure in figures)))
            if kind is Bytecodes:
                _print_functions(each, {name: one.by_function for name, one in counted.items()})
    header = ("input", options.of, "least, million", "median, million", "most, million", "share", "+-")
    print(f"\nmillion {kind.name} of a request\n" + table(header, rows))
    write_csv(options.out / f"{kind.name}.csv", header, rows)


def _print_functions(name: str, counts: Mapping[str, Mapping[str, float]]) -> None:
    """Print the functions of which a request runs more or less bytecodes than of the first commit's."""
    (first, before), *_, (last, now) = *counts.items(), *counts.items()
    changes = {function: now.get(function, 0.0) - before.get(function, 0.0) for function in {**before, **now}}
    largest = sorted(changes, key=lambda function: -abs(changes[function]))[:_MOST_FUNCTIONS]
    if first == last:
        largest = sorted(now, key=lambda function: -now[function])[:_MOST_FUNCTIONS]
    rows = [(each, *(f"{found.get(each, 0.0):.0f}" for found in counts.values())) for each in largest]
    print(f"\nbytecodes of a request, {name}\n" + table(("function", *counts), rows), flush=True)


class _Counted:
    """Sends requests to one frontend, one at a time."""

    def __init__(self, counter: Counter, url: str) -> None:
        self._counter = counter
        self.by_function: dict[str, float] = {}
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=_STARTS_SECONDS)

    def send(self, bodies: Iterable[Body]) -> None:
        """Raise ``RuntimeError`` for an answer that is an error."""
        # The frontend has closed it while the other one was counted.
        self._connection.close()
        for body in bodies:
            self._connection.request("POST", body.path, body.data, {"Content-Type": "application/json"})
            with self._connection.getresponse() as answer:
                if answer.status != 200:
                    raise RuntimeError(f"{answer.status}: {answer.read()[:200]!r}")
                answer.read()

    def count(self, bodies: Sequence[Body]) -> float:
        """Return what was counted of a request, in millions."""
        counted = self._counter.of(partial(self.send, bodies)) / len(bodies) / 1e6
        if isinstance(self._counter, Bytecodes):
            # Without the folder of the working tree.
            self.by_function = {
                name.rpartition("components/src/")[2].rpartition("site-packages/")[2]: count / len(bodies)
                for name, count in self._counter.last.items()
            }
        return counted


@contextmanager
def _bytecode() -> Iterator[None]:
    """Keep what Python compiles meanwhile, where it may be kept nowhere else: a start takes a third."""
    if not sys.dont_write_bytecode:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
        yield


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    with _bytecode():
        for kind, requests in ((Instructions, options.instructions), (Bytecodes, options.bytecodes)):
            if requests:
                _count(options, kind, requests)
        if not options.instructions and not options.bytecodes:
            _measure(options)
    return 0


def _measure(options: argparse.Namespace) -> None:
    services: dict[str, Costs] = {}
    with ExitStack() as stack:
        checkpoint = stack.enter_context(installed(options.vocabulary, options.family))
        load = Load(
            words=CheckpointWords(checkpoint),
            model_name=NAME,
            clients=options.clients,
            warm=options.warm,
            seconds=options.seconds,
            encoding=options.encoding,
            check=options.check,
        )
        new = _deployment(options, checkpoint)
        sides = [("this", new)]
        if options.against is not None:
            tree = stack.enter_context(worktree(options.against))
            sides = [(options.against, replace(new, tree=tree)), *sides]
        else:
            _measure_floors(options, load, checkpoint, services)
        if options.starts > 1:
            # The first to start compiles, and has its memory in other places than those that find bytecode.
            _measure_start(options, load, sides, turns=0)
        for number in range(options.starts):
            order = sides[:: -1 if number % 2 else 1]
            _add(services, _measure_start(options, load, order, options.turns))
    header, rows = _rows(services)
    print("\n" + table(header, rows))
    write_csv(options.out / "cost.csv", header, rows)
    for name, costs in services.items():
        header, part_rows = _parts(costs)
        print(f"\nCPU ms of a request, {name}\n" + table(header, part_rows))
        write_csv(options.out / f"cost-{name.replace(' ', '-')}.csv", header, part_rows)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = usage.parser("benchmarks.cost", __doc__)
    parser.add_argument("--against", metavar="COMMIT", help="compare with this commit of the repository")
    add_vocabulary(parser)
    parser.add_argument("--inputs", nargs="+", choices=WORKLOADS, default=_USUAL_INPUTS)
    parser.add_argument("--family", default=USUAL, help="whose prompts and images are measured")
    parser.add_argument("--encoding", choices=("float", "base64", "bytes_only"), default="float")
    parser.add_argument("--no-check", dest="check", action="store_false", help="clients parse no answer")
    parser.add_argument("--mode", choices=("agg", "e_p"), default="agg")
    parser.add_argument("--frontends", type=int, default=1)
    parser.add_argument("--decoders", type=int, default=2, help="processes that decode images")
    parser.add_argument("--concurrency", type=int, default=64, help="under load")
    parser.add_argument("--clients", type=int, default=2, help="client processes")
    parser.add_argument("--warm", type=float, default=1.0, help="seconds before each window")
    parser.add_argument("--seconds", type=float, default=4.0, help="each window")
    parser.add_argument("--instructions", type=int, default=0, metavar="N", help="count those of N requests")
    parser.add_argument("--bytecodes", type=int, default=0, metavar="N", help="count those of N requests")
    parser.add_argument("--of", choices=("tessera.frontend", "tessera.worker"), default="tessera.frontend")
    parser.add_argument("--counts", type=int, default=3, help="each of so many requests")
    parser.add_argument("--starts", type=int, default=1, help="of each service")
    parser.add_argument("--turns", type=int, default=1, help="windows of each start for each input")
    parser.add_argument("--out", type=Path, default=Path("benchmarks-out"), help="CSV and logs")
    return parser.parse_args(argv)


if __name__ == "__main__":
    # So that `timeout` leaves no worktree and no service behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    raise SystemExit(main())
