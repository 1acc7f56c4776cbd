"""``python -m benchmarks.aiperf``: NVIDIA's AIPerf beside the clients of ``http``, on one service.

Both keep so many requests under way for as long, in turn and more than once, with the same texts and images:
AIPerf sends them in NIM's form (``nim_embeddings``). Their ways to count and to time agree where their rates
are no further apart than those of one of them, which ``apart`` says: its fastest round by its slowest. Rates
and times are the means of the rounds. What repeats in one repeats in the other; of images that never do,
AIPerf is given half as many again as the other clients had answers.

    scripts/clients aiperf      installs it into .cache/aiperf
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from math import ceil, nan
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks import http, usage
from benchmarks.checkpoint import made_checkpoint, usual_units
from benchmarks.service import service
from tessera.models import open_model
from tessera_tools.load.bodies import EMBEDDING, Bodies, HttpWorkload
from tessera_tools.load.clients import Outcome, drive
from tessera_tools.load.words import CheckpointWords
from tessera_tools.table import number, table, write_csv

_INSTALLED: Final = Path(__file__).parent.parent / ".cache" / "aiperf" / "bin" / "aiperf"
_REPEATED: Final = 64
# In which it starts a dozen processes and writes its report: two minutes of a machine that is busy.
_MORE_SECONDS: Final = 300.0

HEADER = (
    "workload", "at once",
    "requests/s", "AIPerf requests/s", "AIPerf/ours", "apart", "AIPerf apart",
    "p50 ms", "AIPerf p50 ms", "p99 ms", "AIPerf p99 ms", "errors", "AIPerf errors",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What both do: ``entries`` inputs of a workload, ``at_once`` requests under way."""

    workload: HttpWorkload
    at_once: int
    entries: int
    warm: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one of them saw: requests a second, milliseconds within which half and 99 % came, what failed."""

    rate: float
    half: float
    most: float
    failed: str

    @classmethod
    def of(cls, outcome: Outcome) -> Round:
        half, most = (value or nan for value in outcome.quantiles(0.5, 0.99))
        return cls(rate=outcome.requests_rate, half=half, most=most, failed=outcome.failed)

    @classmethod
    def reported(cls, report: Mapping[str, Any]) -> Round:
        """Of AIPerf's own report."""
        latency, failed = report["request_latency"], report.get("error_request_count") or {"avg": 0}
        return cls(
            rate=report["request_throughput"]["avg"],
            half=latency["p50"],
            most=latency["p99"],
            failed=number(failed["avg"]),
        )


def write_inputs(asked: Asked, words: CheckpointWords, file: Path) -> None:
    """Write a workload's inputs as AIPerf reads them, a request to a line."""
    bodies = Bodies(asked.workload, words, "", seed=1 << 20, encoding="float")
    lines = [json.dumps(_turn(json.loads(body.data))) for body in islice(iter(bodies), asked.entries)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _turn(body: dict[str, Any]) -> dict[str, list[str]]:
    """The texts and images of a request of ours."""
    if "input" in body:
        return {"texts": [body["input"]] if isinstance(body["input"], str) else body["input"]}
    parts = body["messages"][0]["content"]
    turn = {"images": [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]}
    texts = [part["text"] for part in parts if part["type"] == "text"]
    return turn | ({"texts": texts} if texts else {})


def profile(
    asked: Asked, options: argparse.Namespace, url: str, inputs: Path, folder: Path
) -> dict[str, Any]:
    """Run AIPerf and return its report; raises ``SystemExit`` with what it said where it fails."""
    command = [str(options.aiperf), "profile", "--model", options.model_name, "--url", url]
    command += ["--endpoint-type", "nim_embeddings", "--tokenizer", str(options.model_path), "--ui", "none"]
    command += ["--input-file", str(inputs), "--custom-dataset-type", "single_turn"]
    command += ["--concurrency", str(asked.at_once), "--warmup-duration", f"{asked.warm:g}"]
    command += ["--benchmark-duration", f"{asked.seconds:g}", "--artifact-dir", str(folder)]
    command += ["--export-level", "summary", "--no-gpu-telemetry", "--no-server-metrics"]
    report = folder / "profile_export_aiperf.json"
    # In a session of its own, whose processes end with it.
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = running.communicate(timeout=asked.warm + asked.seconds + _MORE_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    if running.returncode or not report.exists():
        raise SystemExit(f"AIPerf: {said[-4000:]}")
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def row(ours: Sequence[Round], theirs: Sequence[Round]) -> tuple[str, ...]:
    """The rounds of both below ``HEADER``, without its first two."""
    clients = (ours, theirs)
    rates = [fmean(each.rate for each in rounds) for rounds in clients]
    apart = [max(each.rate for each in rounds) / min(each.rate for each in rounds) for rounds in clients]
    halves = [fmean(each.half for each in rounds) for rounds in clients]
    most = [fmean(each.most for each in rounds) for rounds in clients]
    failed = [" ".join(each.failed for each in rounds if each.failed != "0") or "0" for rounds in clients]
    values = (*rates, rates[1] / rates[0], *apart, *halves, *most)
    return (*map(number, values), *failed)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = usage.parser("benchmarks.aiperf", __doc__)
    parser.add_argument("--url", nargs="*", help="a running service; started here by default")
    parser.add_argument("--mode", choices=("agg", "e_p"), default="agg")
    parser.add_argument(
        "--workloads",
        nargs="*",
        default=["text-1024@2", "text-128@1,32", "tile-again@8", "tile@32"],
        metavar="NAME@N,N",
        help=f"with how many requests at once; of {', '.join(EMBEDDING)}",
    )
    parser.add_argument("--rounds", type=int, default=2, help="of each client, in turn")
    parser.add_argument("--aiperf", type=Path, default=_INSTALLED, help="its executable")
    http.add_shared(parser)
    parser.set_defaults(encoding="float", concurrency=[8], rate=None)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, ...]] = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options.model_path = made_checkpoint(options, scratch)
        options.units = options.units or usual_units(open_model(options.model_path))
        words = CheckpointWords(options.model_path)
        urls = tuple(options.url or ()) or stack.enter_context(
            service(http.deployment(options), options.out / "logs")
        )
        for workload, loops in http.chosen_workloads(options):
            for loop in map(int, loops):
                name = f"{workload.name}-{loop}"
                seconds = options.warm + options.seconds
                fresh = workload.size is not None and workload.fresh
                ours: list[Round] = []
                theirs: list[Round] = []
                for number_of in range(options.rounds):
                    ours.append(Round.of(drive(http.load(options), urls, workload, loop)))
                    entries = ceil(1.5 * ours[-1].rate * seconds) + loop if fresh else _REPEATED
                    asked = Asked(
                        workload=workload,
                        at_once=loop,
                        entries=entries,
                        warm=options.warm,
                        seconds=options.seconds,
                    )
                    inputs = scratch / f"{name}.jsonl"
                    write_inputs(asked, words, inputs)
                    folder = options.out.absolute() / f"{name}-{number_of}"
                    theirs.append(Round.reported(profile(asked, options, urls[0], inputs, folder)))
                rows.append((workload.name, str(loop), *row(ours, theirs)))
                print("  ".join(rows[-1]), flush=True)
                write_csv(options.out / "aiperf.csv", HEADER, rows)
    print("\n" + table(HEADER, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
