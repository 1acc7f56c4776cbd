"""Which checkpoint a benchmark runs with, and how large its vision batches are."""

from __future__ import annotations

import argparse
from pathlib import Path

from tessera.models import Model
from tessera_tools.random_checkpoint.checkpoint import main as make_checkpoint


def add_model(parser: argparse.ArgumentParser) -> None:
    """Which checkpoint."""
    parser.add_argument("--model-path", type=Path, help="a checkpoint; a random one by default")
    parser.add_argument("--family", default="llama_nemotron_vl", help="of the random one")
    parser.add_argument("--size", choices=("tiny", "full"), default="full", help="of the random one")


def made_checkpoint(options: argparse.Namespace, folder: Path) -> Path:
    """The checkpoint that is asked for; written below ``folder`` if it is a random one."""
    if options.model_path is not None:
        return Path(options.model_path)
    path = folder / "model"
    dtype = "bfloat16" if options.size == "full" else "float32"
    make_checkpoint(
        ["--out", str(path), "--family", options.family, "--size", options.size, "--dtype", dtype]
    )
    return path


def usual_units(model: Model) -> int:
    """A vision batch that fills a card: 28 tiles, or the patches of four of the largest images."""
    if model.vision is None:
        return 1
    return 28 if model.vision.independent_units else 4 * model.vision.max_units
