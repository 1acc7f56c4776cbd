"""``python -m benchmarks.aoti``: AOTInductor engines on this machine, from the build to their speed.

Writes a random checkpoint unless one is given, builds the vision and the text engine of ``--config`` each in
a process of its own, and runs ``benchmarks.engine`` once with torch's engines and once with the built ones,
in fresh processes. Ready is what that process printed for loading and warming both engines.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from benchmarks.table import table

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "engine_configs" / "llama_nemotron_vl" / "aoti_h100.yaml"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aoti", description=__doc__)
    parser.add_argument("--model-path", type=Path, help="a checkpoint; a random one by default")
    parser.add_argument("--size", choices=("tiny", "full"), default="full", help="of the random one")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row")
    parser.add_argument("--out", type=Path, help="keeps checkpoint, engines and figures there")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        _run(options, options.out or Path(folder))
    return 0


def _run(options: argparse.Namespace, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model = options.model_path or folder / "model"
    if not model.exists():
        _python(
            *("tessera.models.llama_nemotron_vl.random_checkpoint", "--out", str(model)),
            *("--size", options.size, "--dtype", "bfloat16" if options.size == "full" else "float32"),
        )
    for stage in ("vision", "text"):
        out = folder / stage
        if out.exists():
            continue
        started = time.perf_counter()
        _python(
            *(
                "tessera.commands.engine",
                "build",
                "--model-path",
                str(model),
                "--config",
                str(options.config),
            ),
            *("--stage", stage, "--out", str(out)),
        )
        print(f"built {stage} in {time.perf_counter() - started:.1f} s", flush=True)
    rows, ready = {}, {}
    for kind in ("torch", "aoti"):
        config = _config(options.config, folder, kind)
        said = _python(
            *(
                "benchmarks.engine",
                "--model-path",
                str(model),
                "--config",
                str(config),
                "--size",
                options.size,
            ),
            *("--seconds", str(options.seconds), "--out", str(folder / kind)),
        )
        ready[kind] = sum(float(found) for found in re.findall(r"(?:engine|warm-up): ([\d.]+) s", said))
        with (folder / kind / "engine.csv").open() as file:
            rows[kind] = {row["workload"]: row["per s"] for row in csv.DictReader(file)}
    compared = [
        (name, mine, rows["aoti"].get(name, ""), _ratio(rows["aoti"].get(name), mine))
        for name, mine in rows["torch"].items()
    ]
    compared.append(("seconds to ready", f"{ready['torch']:.1f}", f"{ready['aoti']:.1f}", ""))
    print("\n" + table(("workload", "torch, per s", "aoti, per s", "aoti / torch"), compared))


def _config(path: Path, folder: Path, kind: str) -> Path:
    """The engine config with both stages run by ``kind``."""
    stages = yaml.safe_load(path.read_text())
    for stage in ("vision", "text"):
        stages[stage] |= {"engine": kind, "path": str(folder / stage)}
    written = folder / f"{kind}.yaml"
    written.write_text(yaml.safe_dump(stages))
    return written


def _python(module: str, *arguments: str) -> str:
    """Run a module in a process of its own; its output is shown and returned."""
    paths = [str(ROOT), str(ROOT / "components" / "src"), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        print(line, end="", flush=True)
        said.append(line)
    if process.wait():
        raise SystemExit(f"{module} ended with status {process.returncode}")
    return "".join(said)


def _ratio(one: str | None, other: str) -> str:
    try:
        return f"{float((one or '').replace(',', '')) / float(other.replace(',', '')):.3f}"
    except ValueError:
        return ""


if __name__ == "__main__":
    raise SystemExit(main())
