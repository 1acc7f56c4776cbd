"""Which checkpoint a benchmark runs with, and how large its vision batches are."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from tessera.models import Model
from tessera_tools.random_checkpoint.checkpoint import AUTO
from tessera_tools.random_checkpoint.checkpoint import main as make_checkpoint

_PACKAGES: Final = Path(__file__).parent.parent / ".cache" / "vocabularies"
MADE_UP: Final = "made-up"


def add_model(parser: argparse.ArgumentParser) -> None:
    """Which checkpoint."""
    parser.add_argument("--model-path", type=Path, help="a checkpoint; a random one by default")
    parser.add_argument("--family", default="llama_nemotron_vl", help="of the random one")
    parser.add_argument("--size", choices=("tiny", "full"), default="full", help="of the random one")
    add_vocabulary(parser)


def add_vocabulary(parser: argparse.ArgumentParser) -> None:
    """Which vocabulary the random one has."""
    parser.add_argument(
        "--vocabulary",
        default=usual_vocabulary(),
        metavar="DIR|auto|made-up",
        help="of the random one at full size: a published one, which DIR's packages carry (scripts/clients "
        "vocabularies); auto: if this environment has it; by default what that script made, or auto",
    )


def usual_vocabulary() -> str:
    """Where ``scripts/clients vocabularies`` puts them, if it has, else wherever Python imports from."""
    return str(_PACKAGES) if _PACKAGES.exists() else AUTO


def made_checkpoint(options: argparse.Namespace, folder: Path) -> Path:
    """The checkpoint that is asked for; written below ``folder`` if it is a random one."""
    if options.model_path is not None:
        return Path(options.model_path)
    path = folder / "model"
    dtype = "bfloat16" if options.size == "full" else "float32"
    command = ["--out", str(path), "--family", options.family, "--size", options.size, "--dtype", dtype]
    if options.size == "full" and options.vocabulary != MADE_UP:
        command += ["--vocabulary", options.vocabulary]
    make_checkpoint(command)
    return path


def usual_units(model: Model) -> int:
    """A vision batch that fills a card: 28 tiles, or the patches of four of the largest images."""
    if model.vision is None:
        return 1
    return 28 if model.vision.independent_units else 4 * model.vision.max_units
