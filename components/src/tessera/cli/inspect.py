"""``tessera-engine inspect``: what a built engine is, as JSON."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tessera.engine.compiled.flavours import flavour
from tessera.engine.compiled.manifest import MANIFEST_FILE, Manifest
from tessera.errors import ConfigError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_to(commands: Subparsers) -> None:
    parser = commands.add_parser("inspect", help="describe a built engine as JSON")
    parser.add_argument("directory", type=Path, help="what tessera-engine build made")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    manifest = Manifest.read(options.directory)
    try:
        compiler = flavour(manifest.flavour)
    except ConfigError as error:
        raise ConfigError(f"{options.directory / MANIFEST_FILE}: {error}") from error
    found = {
        "manifest": msgspec.to_builtins(manifest),
        "engine": compiler.inspect(options.directory, manifest),
    }
    print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
