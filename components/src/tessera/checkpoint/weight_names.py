"""The names of files that hold weights; the standard library alone, for the launcher."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
STATE_FILE: Final = "pytorch_model.bin"
STATE_INDEX_FILE: Final = "pytorch_model.bin.index.json"

WEIGHTS: Final = (SINGLE_FILE, INDEX_FILE, STATE_FILE, STATE_INDEX_FILE)
"""Of a model, of which the first that is there is read, as by ``transformers``."""

MODULE_WEIGHTS: Final = (SINGLE_FILE, STATE_FILE)
"""Of a module of ``modules.json``, likewise."""

ADAPTER_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin")
"""Of an adapter of PEFT, likewise."""

HEAD_FILES: Final = ("sparse_linear.pt", "colbert_linear.pt")
"""The states beside the weights that BGE M3's checkpoints have, of the heads of its further outputs."""

_OF_SHARDS: Final = {INDEX_FILE: ".safetensors", STATE_INDEX_FILE: ".bin"}


def first_of(names: Iterable[str], has: Callable[[str], bool]) -> str | None:
    """Return the first of some names that is there, None without any."""
    return next(filter(has, names), None)


def is_index(name: str) -> bool:
    """Whether a file names the shards that hold weights."""
    return name in _OF_SHARDS


def is_shard(name: str, index: str) -> bool:
    """Whether an index may name this file: one beside it, of its own format."""
    return "/" not in name and name.endswith(_OF_SHARDS[index])
