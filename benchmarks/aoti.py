"""``python -m benchmarks.aoti``: AOTInductor engines on this machine, from the build to their speed.

Writes a random checkpoint unless one is given. ``build`` compiles the vision and the text engine of
``--config`` at the same time, each in a process of its own. ``check`` loads them in a fresh process and
compares them with float32; ``measure`` runs ``benchmarks.engine`` in fresh processes, once with torch's
engines and once with the built ones. Ready is the time from the start of such a process to its warm engines,
imports included.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import yaml

from benchmarks import usage
from tessera_engines.kinds import ENGINE_CONFIGS
from tessera_tools.table import table, write_csv

ROOT = Path(__file__).parents[1]
CONFIG = ENGINE_CONFIGS / "llama_nemotron_vl" / "aoti_h100.yaml"
STAGES = ("vision", "text")
STEPS = ("build", "check", "measure")
HEADER = ("workload", "torch, per s", "aoti, per s", "aoti / torch")
# The last line that benchmarks.engine prints before its engines can serve.
_READY = "vision warm-up:"
# As much of a compiler's message as says what is wrong.
_MESSAGE_LINES = 60


def main(argv: Sequence[str] | None = None) -> int:
    parser = usage.parser("benchmarks.aoti", __doc__)
    parser.add_argument("--model-path", type=Path, help="a checkpoint; a random one by default")
    parser.add_argument("--size", choices=("tiny", "full"), default="full", help="of the random one")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="to build")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row")
    parser.add_argument("--out", type=Path, help="keeps checkpoint, engines, logs and figures there")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        run = _Run(options, options.out or Path(folder))
        for step in STEPS:
            if step in options.steps:
                getattr(run, step)()
    return 0


class _Run:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._model: Path = options.model_path or folder / "model"
        if not self._model.exists():
            dtype = "bfloat16" if options.size == "full" else "float32"
            maker = "tessera_tools.random_checkpoint.checkpoint"
            _python(maker, "--out", str(self._model), "--size", options.size, "--dtype", dtype)

    def build(self) -> None:
        """Raises ``SystemExit`` when a build failed, after both have ended."""
        started, builders = time.perf_counter(), {}
        for stage in self._options.stages:
            if (self._folder / stage).exists():
                continue
            with self._log(stage).open("w") as log:
                builders[stage] = _start(
                    *("tessera_engines.cli", "build", "--model-path", str(self._model)),
                    *("--config", str(self._options.config), "--stage", stage),
                    *("--out", str(self._folder / stage)),
                    stdout=log,
                )
        failed = []
        while builders:
            for stage in [stage for stage, builder in builders.items() if builder.poll() is not None]:
                taken = time.perf_counter() - started
                if builders.pop(stage).returncode:
                    failed.append(stage)
                said = "".join(self._log(stage).read_text().splitlines(True)[:_MESSAGE_LINES])
                print(f"{said}{stage}: ended after {taken:.1f} s", flush=True)
            time.sleep(0.2)
        if failed:
            raise SystemExit(f"could not build {' and '.join(failed)}")

    def check(self) -> None:
        print(f"ready after {self._engines('aoti', '--no-rates'):.1f} s", flush=True)

    def measure(self) -> None:
        rows: dict[str, dict[str, str]] = {}
        ready: dict[str, float] = {}
        for kind in ("torch", "aoti"):
            out = self._folder / kind
            arguments = ("--seconds", str(self._options.seconds), "--out", str(out), "--no-check")
            ready[kind] = self._engines(kind, *arguments)
            with (out / "engine.csv").open() as file:
                rows[kind] = {row["workload"]: row["per s"] for row in csv.DictReader(file)}
        compared = [
            (name, mine, rows["aoti"].get(name, ""), _ratio(rows["aoti"].get(name), mine))
            for name, mine in rows["torch"].items()
        ]
        compared.append(("seconds to ready", f"{ready['torch']:.1f}", f"{ready['aoti']:.1f}", ""))
        write_csv(self._folder / "aoti.csv", HEADER, compared)
        print("\n" + table(HEADER, compared))

    def _engines(self, kind: str, *arguments: str) -> float:
        """Run ``benchmarks.engine``; seconds until its engines were ready."""
        return _python(
            *("benchmarks.engine", "--model-path", str(self._model), "--size", self._options.size),
            *("--config", str(self._config(kind)), *arguments),
        )

    def _config(self, kind: str) -> Path:
        """The engine config with both stages run by ``kind``."""
        stages = yaml.safe_load(self._options.config.read_text())
        for stage in STAGES:
            stages[stage] |= {"engine": kind, "path": str(self._folder / stage)}
        written = self._folder / f"{kind}.yaml"
        written.write_text(yaml.safe_dump(stages))
        return written

    def _log(self, stage: str) -> Path:
        return self._folder / f"build-{stage}.log"


def _start(module: str, *arguments: str, stdout: int | IO[str]) -> subprocess.Popen[str]:
    paths = [str(ROOT), str(ROOT / "components" / "src"), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _python(module: str, *arguments: str) -> float:
    """Run a module in a process of its own and show its output; seconds until it said that it was ready."""
    started = time.perf_counter()
    process = _start(module, *arguments, stdout=subprocess.PIPE)
    assert process.stdout is not None
    ready = 0.0
    for line in process.stdout:
        print(line, end="", flush=True)
        if line.startswith(_READY):
            ready = time.perf_counter() - started
    if process.wait():
        raise SystemExit(f"{module} ended with status {process.returncode}")
    return ready


def _ratio(one: str | None, other: str) -> str:
    try:
        return f"{float((one or '').replace(',', '')) / float(other.replace(',', '')):.3f}"
    except ValueError:
        return ""


if __name__ == "__main__":
    raise SystemExit(main())
