"""Where kernels are kept that were compiled at the first start, so that later ones need not wait for them."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

CACHE_VARIABLE: Final = "TESSERA_CACHE_DIR"
"""The directory of everything that may be removed and is made again."""

# The compilers' own variables. FlashAttention keeps nothing unless it is told to.
_FOLDERS: Final = {
    "TRITON_CACHE_DIR": "triton",
    "QUACK_CACHE_DIR": "quack",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash-attention",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
_SWITCHES: Final = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}


def cache_directory() -> Path:
    """Return the directory: ``TESSERA_CACHE_DIR``, or ``tessera`` in the user's caches."""
    if (named := os.environ.get(CACHE_VARIABLE)) is not None:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tessera"


def keep_kernels() -> None:
    """Tell the compilers where; what the environment says already stays.

    Call it before one of them is imported. Without a directory that can be written they do as they would.
    """
    try:
        directory = cache_directory()
        directory.mkdir(parents=True, exist_ok=True)
        writable = os.access(directory, os.W_OK)
    except (OSError, RuntimeError) as error:
        log.warning("compiled kernels are not kept: %s", error)
        return
    if not writable:
        log.warning("compiled kernels are not kept: %s cannot be written", directory)
        return
    for variable, folder in _FOLDERS.items():
        os.environ.setdefault(variable, str(directory / folder))
    for variable, value in _SWITCHES.items():
        os.environ.setdefault(variable, value)
