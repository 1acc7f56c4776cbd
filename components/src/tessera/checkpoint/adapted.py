"""Joins an adapter that lies alone with the model that it changes: a directory of links to the files of both.

Nothing is copied, and neither directory is written to. Equal files have one such directory below ``HF_HOME``,
which every process of a host makes or finds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from blake3 import blake3

from tessera.atomic_directory import atomic_directory
from tessera.checkpoint.adapter import ADAPTER_FILE, Adapter
from tessera.checkpoint.declared import (
    MODULES_FILE,
    PROMPTS_FILE,
    module_files,
)
from tessera.checkpoint.section import CONFIG_FILE
from tessera.checkpoint.source import Source
from tessera.checkpoint.transformer import TRANSFORMER_FILES
from tessera.errors import CheckpointError

_DECLARE: Final = {MODULES_FILE, PROMPTS_FILE, *TRANSFORMER_FILES}
_MOST_FILES: Final = 10_000


def adapted(source: Source, find: Callable[[str, str], Source]) -> Source:
    """Return the source with a directory that has the files of its adapter and of the adapter's base.

    ``find`` looks for the base by name and revision. Raises ``CheckpointError`` for an adapter that is not
    done or names no base, and what ``find`` raises.
    """
    adapter = Adapter.read(source.directory)
    assert adapter is not None
    config = adapter.config
    if not adapter.weights.exists():
        raise CheckpointError(f"{adapter.weights}: there is no such file; no other weight format is read")
    name = config.string("base_model_name_or_path")
    revision = config.string("revision", "") if not os.path.isdir(name) else ""
    base = find(name, revision).directory
    if not (base / CONFIG_FILE).exists():
        raise config.error(
            "base_model_name_or_path",
            f"is {name!r}, no directory of a model here, and no model of a hub; correct it,"
            " or put the adapter's files beside the base's",
        )
    if (base / ADAPTER_FILE).exists():
        raise config.error("base_model_name_or_path", f"is {name!r}, which has an adapter of its own")
    return replace(source, directory=_joined(source.directory.resolve(), base.resolve()))


def _joined(adapter: Path, base: Path) -> Path:
    """Return the directory of links; what the adapter has wins, but for the configuration of the base.

    Where the adapter has a ``modules.json``, nothing counts that the base declares.
    """
    own, files = _files(adapter), _files(base)
    if MODULES_FILE in own:
        files = {name: file for name, file in files.items() if name not in _DECLARE and "/" not in name}
    files |= {name: file for name, file in own.items() if name != CONFIG_FILE}
    digest = blake3("\0".join(f"{name}\0{file}" for name, file in sorted(files.items())).encode())
    out = _home() / "tessera-adapters" / digest.hexdigest(length=16) / adapter.name
    try:
        if not out.exists():
            with atomic_directory(out, first_wins=True) as directory:
                for name, file in files.items():
                    (directory / name).parent.mkdir(exist_ok=True)
                    (directory / name).symlink_to(file)
    except OSError as error:
        raise CheckpointError(
            f"{out}: cannot be written: {error.strerror or error};"
            " set HF_HOME to a place that can be written to"
        ) from error
    return out


def _files(directory: Path) -> dict[str, Path]:
    """Return the files of a checkpoint by their names below its directory: at the top, and of modules."""
    with os.scandir(directory) as entries:
        names = sorted(entry.name for entry in entries if entry.is_file())
    if len(names) > _MOST_FILES:
        raise CheckpointError(f"{directory}: has more than {_MOST_FILES} files, so it is no checkpoint")
    names += [name for any_of in module_files(directory) for name in any_of if (directory / name).exists()]
    return {name: directory / name for name in names}


def _home() -> Path:
    """Return the directory of ``huggingface_hub``, which takes 0.3 s to import."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or Path(cache) / "huggingface").expanduser()
