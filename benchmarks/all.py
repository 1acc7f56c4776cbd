"""``python -m benchmarks.all``: the benchmarks that ``RESULTS.md`` has of cards, one after another.

Each runs for at most its own time, in a process of its own, and leaves ``OUT/NAME.log`` and what it writes in
``OUT/NAME``. One that fails is named at the end, and the next begins. Run again with the same ``--out`` it
goes on with those that have not ended well, for a machine that is there for half an hour at a time.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Final

from benchmarks.checkpoint import add_vocabulary, made_checkpoint
from benchmarks.proc import below
from tessera.machine import cards
from tessera_tools.table import table

_ROOT: Final = Path(__file__).parent.parent
_SERVED: Final = "--frontends 6 --threads 6 --clients 4"
_SUSTAINED: Final = f"--no-engine --warm 4 --seconds 6 {_SERVED}"
_PACKAGES: Final = (
    "torch",
    "triton",
    "transformers",
    "quack-kernels",
    "flash-attn-4",
    "ai-dynamo-runtime",
    "nixl",
)
# A benchmark that is told to end stops what it has started.
_END_SECONDS: Final = 20.0


@dataclass(frozen=True, slots=True)
class Benchmark:
    """``words`` behind ``python -m benchmarks.``, for at most ``seconds``.

    ``family`` is that of the random checkpoint; None where the benchmark makes its own. ``sized`` ones ask
    for its size. ``vllm`` ones need its packages. ``environment`` is what is set beside this process's.
    ``cards`` is how many it has of those that this process sees.
    """

    words: str
    seconds: float
    family: str | None = "llama_nemotron_vl"
    sized: bool = True
    vllm: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    cards: int = 1


def _split(mps: str) -> Benchmark:
    words = f"http --mode e_p {_SUSTAINED} --workloads tile@128 page@48"
    return Benchmark(words, 150, environment={"TESSERA_CUDA_MPS": mps})


def _beside_vllm(words: str, seconds: float, family: str = "llama_nemotron_vl") -> Benchmark:
    return Benchmark(f"peer {words} {_SERVED} --limit {seconds - 20:.0f}", seconds, family, vllm=True)


def _on_both_cards(seconds: float) -> Benchmark:
    words = "peer --parts engine default split --encoding float --warm 10 --seconds 10"
    rows = "text-1024@64 text-128@512 text-32x64@32 tile@128 page@48 tile-again@128"
    served = f"--frontends 6 --threads 6 --clients 8 --limit {seconds - 20:.0f}"
    return Benchmark(f"{words} {served} --workloads {rows}", seconds, cards=2)


# The first tells the most, where there is half an hour for all. Seconds are about one and a half times those
# that an H200 took.
BENCHMARKS: Final[Mapping[str, Benchmark]] = {
    "peer": _beside_vllm("--warm 10 --seconds 10", 1000),
    "cards": _on_both_cards(700),
    "engine": Benchmark("engine --seconds 0.7", 180),
    "mixed": Benchmark(f"http {_SUSTAINED} --workloads mixed@256 mixed-always-encode@256", 120),
    "closed": Benchmark(f"http {_SUSTAINED} --workloads text-128@8,16,24,32,48 tile@8,16,24,32,48", 240),
    "open-text": Benchmark(f"http {_SUSTAINED} --workloads text-128 --rate 1800", 90),
    "open-tile": Benchmark(f"http {_SUSTAINED} --workloads tile --rate 300", 90),
    "split": _split("off"),
    "split-mps": _split("on"),
    "aoti": Benchmark("aoti --seconds 0.4", 420),
    "peer-fp8": _beside_vllm("--quantization fp8 --warm 8 --seconds 8", 700),
    "bulk": Benchmark("bulk --warm 4 --seconds 8", 900, vllm=True),
    "engine-qwen3-vl": Benchmark("engine --seconds 1", 240, "qwen3_vl_embedding"),
    "peer-qwen3-vl": _beside_vllm("--warm 8 --seconds 8", 800, "qwen3_vl_embedding"),
    "peer-fp8-qwen3-vl": _beside_vllm("--quantization fp8 --warm 8 --seconds 8", 700, "qwen3_vl_embedding"),
    "peer-rerank": _beside_vllm(
        "--workloads rerank-128x100@8 --warm 8 --seconds 8", 300, "llama_nemotron_rerank"
    ),
    "cost": Benchmark("cost --inputs text-32 tile --seconds 3", 120, None, sized=False),
    "overhead": Benchmark(
        "overhead --transports inline shm cuda_ipc --clients 2 --warm 1 --seconds 3", 180, None, sized=False
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "about.txt").write_text(about())
    end = time.monotonic() + options.limit
    rows = []
    for name in options.only or BENCHMARKS:
        rows.append((name, *_ran(name, BENCHMARKS[name], options, end)))
        print(f"{name}: {rows[-1][1]}", flush=True)
    print(table(("benchmark", "ended", "seconds"), rows))
    return int(any(ended not in ("well", "well before") for _, ended, _ in rows))


def _ran(name: str, benchmark: Benchmark, options: argparse.Namespace, end: float) -> tuple[str, str]:
    """How the benchmark ended, and after how many seconds."""
    done = options.out / f"{name}.done"
    if done.exists():
        return "well before", done.read_text()
    if benchmark.vllm and options.vllm is None:
        return "not begun: it needs --vllm", ""
    seen = cards(os.environ)
    if benchmark.cards > max(1, len(seen)):
        return f"not begun: it needs {benchmark.cards} cards", ""
    left = end - time.monotonic()
    if left < benchmark.seconds:
        return f"not begun: {benchmark.seconds:.0f} s are wanted, {max(left, 0):.0f} are left", ""
    module, *words = benchmark.words.split()
    command = [sys.executable, "-m", f"benchmarks.{module}", *words]
    command += ["--out", str(options.out / name)]
    if benchmark.family is not None:
        command += ["--model-path", str(_checkpoint(benchmark.family, options))]
    if benchmark.sized:
        command += ["--size", options.size]
    if benchmark.vllm:
        command += ["--vllm", str(options.vllm), "--vllm-python", options.vllm_python]
    started = time.monotonic()
    with (options.out / f"{name}.log").open("wb") as log:
        environment = os.environ | benchmark.environment
        if seen:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(card.entry for card in seen[: benchmark.cards])
        status = _run(command, environment, benchmark.seconds, log.fileno())
    seconds = f"{time.monotonic() - started:.0f}"
    if status == 0:
        done.write_text(seconds)
    return {0: "well", None: "out of time"}.get(status, f"with {status}, see {name}.log"), seconds


def _run(command: Sequence[str], environment: Mapping[str, str], seconds: float, log: int) -> int | None:
    """The status of the command; None where it ran out of time. Nothing that it started is left."""
    process = subprocess.Popen(command, cwd=_ROOT, env=environment, stdout=log, stderr=log)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        started = below(process.pid)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pid in started:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        return None


def _checkpoint(family: str, options: argparse.Namespace) -> Path:
    """A random one of the family, made once."""
    path = Path(options.out / f"checkpoint-{family}")
    if not path.exists():
        scratch = path.with_suffix(".part")
        shutil.rmtree(scratch, ignore_errors=True)
        wanted = argparse.Namespace(
            model_path=None, family=family, size=options.size, vocabulary=options.vocabulary
        )
        made_checkpoint(wanted, scratch).rename(path)
        scratch.rmdir()
    return path


def about() -> str:
    """The commit, the machine and the versions that figures are of."""
    commit = _said("git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD") or "no repository"
    changed = " with changes" if _said("git", "-C", str(_ROOT), "status", "--porcelain") else ""
    card = _said("nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader")
    lines = [
        f"commit: {commit}{changed}",
        f"card: {card or 'none'}",
        f"cores: {len(os.sched_getaffinity(0))}",
        f"Python: {platform.python_version()}",
    ]
    for name in _PACKAGES:
        try:
            lines.append(f"{name}: {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return "\n".join(lines) + "\n"


def _said(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.all", description=(__doc__ or "").partition(": ")[2]
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="a directory for logs, figures and checkpoints"
    )
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument(
        "--limit", type=float, default=7200.0, help="seconds; what would take longer is not begun"
    )
    parser.add_argument("--size", choices=("tiny", "full"), default="full", help="of the random checkpoints")
    add_vocabulary(parser)
    parser.add_argument(
        "--vllm", type=Path, metavar="SITE", help="packages of vLLM, without which some are left out"
    )
    parser.add_argument("--vllm-python", default="python3", help="the interpreter of these packages")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
