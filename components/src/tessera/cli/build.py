"""``tessera-engine build``: one stage of a checkpoint, as the engine config describes it."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tessera.config import convert, load_stages
from tessera.engine.compiled.build import build_engine
from tessera.engine.compiled.spec import DTYPES, BuildSpec, Layout, Stage
from tessera.errors import ConfigError
from tessera.models import open_model

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser("build", help="build an engine from a checkpoint")
    parser.add_argument("--model-path", type=Path, required=True, help="a checkpoint directory")
    parser.add_argument("--stage", choices=[stage.value for stage in Stage], required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a directory to make")
    parser.add_argument("--config", type=Path, help="an engine config file whose build list has the stage")
    parser.add_argument("--timing-cache", type=Path, metavar="FILE", help="read and updated")
    changes = parser.add_argument_group("instead of what the config says")
    changes.add_argument("--flavour", help="aoti, tensorrt or tensorrt_rtx")
    changes.add_argument("--dtype", choices=DTYPES)
    changes.add_argument("--layout", choices=[layout.value for layout in Layout])
    changes.add_argument("--capability", action="append", metavar="8.9", help="may be given several times")
    changes.add_argument(
        "--decomposable", action="store_true", help="build even where no fused attention kernel exists"
    )
    changes.add_argument("--calibration", type=Path, metavar="DIR", help="images and texts for float8")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    spec = spec_of(options)
    started = time.monotonic()

    def progress(what: str) -> None:
        print(f"{time.monotonic() - started:7.1f} s  {what}", file=sys.stderr, flush=True)

    progress(f"opening {options.model_path}")
    model = open_model(options.model_path)
    manifest = build_engine(model, spec, options.out, timing_cache=options.timing_cache, progress=progress)
    size = sum(entry.nbytes for entry in manifest.files.values())
    print(
        f"{options.out}: {manifest.stage} {manifest.flavour} {manifest.dtype} engine for"
        f" {', '.join(manifest.capabilities)}, {size / (1 << 20):.1f} MiB, {manifest.build_seconds:.1f} s"
    )


def spec_of(options: argparse.Namespace) -> BuildSpec:
    """The config's entry for the stage with the flags over it; raises ``ConfigError``."""
    values: dict[str, Any] = {"stage": options.stage}
    if options.config is not None:
        entries = [spec for spec in load_stages(options.config, None).build if spec.stage == options.stage]
        if len(entries) > 1:
            raise ConfigError(f"{options.config}: build lists the stage {options.stage} {len(entries)} times")
        if not entries and options.flavour is None:
            raise ConfigError(f"{options.config}: build has no entry with the stage {options.stage}")
        values = msgspec.to_builtins(entries[0], enc_hook=str) if entries else values
    changes = {
        "flavour": options.flavour,
        "dtype": options.dtype,
        "layout": options.layout,
        "capabilities": options.capability,
        "decomposable": options.decomposable or None,
        "calibration": options.calibration and str(options.calibration),
    }
    values |= {key: value for key, value in changes.items() if value is not None}
    if "flavour" not in values:
        raise ConfigError("build needs --flavour, or --config with a file whose build list has the stage")
    spec = convert(BuildSpec, values, str(options.config or "build"))
    if options.calibration is not None and spec.dtype != "float8":
        raise ConfigError(f"--calibration is for --dtype float8, and this stage is built in {spec.dtype}")
    return spec
