"""``tessera-engine inspect``: what a built engine is, as JSON."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tessera.engine.building.flavours import flavour
from tessera.engine.building.manifest import Manifest

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser("inspect", help="describe a built engine as JSON")
    parser.add_argument("directory", type=Path, help="what tessera-engine build made")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    manifest = Manifest.read(options.directory)
    manifest.verify_files(options.directory)
    found = {
        "manifest": msgspec.to_builtins(manifest),
        "engine": flavour(manifest.flavour).inspect(options.directory, manifest),
    }
    print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
