"""GEMM kernels that quack-kernels compiles when a program first calls it, kept in the engine's directory.

The library keeps them as object files in ``QUACK_CACHE_DIR``, by default below /tmp, named by hashes of its
own sources and of what each was compiled for. On another machine or in a new container an engine would
compile them anew, some 10 s for each stage.
"""

from __future__ import annotations

import functools
import os
import shutil
import uuid
from pathlib import Path
from tempfile import TemporaryDirectory

from tessera.errors import ConfigError

FOLDER = "products"
_KERNELS = "*.o"


@functools.cache
def _collection() -> TemporaryDirectory[str]:
    """Point the library at a new folder for what it compiles from now on.

    One for the whole process, since it compiles nothing twice: a second engine has kernels of the first.
    """
    import quack.cache

    folder = TemporaryDirectory(prefix="tessera-products-")
    quack.cache.CACHE_DIR = folder.name
    return folder


def collect() -> None:
    """Begin to collect kernels; call it before the GEMMs run."""
    _collection()


def store(directory: Path) -> None:
    """Copy what was compiled since ``collect`` into ``directory``, an engine's."""
    _copy(Path(_collection().name), directory / FOLDER)


def restore(directory: Path) -> None:
    """Copy an engine's kernels to where the library looks for them.

    Raises ``ConfigError`` naming that place if it cannot be written to.
    """
    if not (directory / FOLDER).is_dir():
        return
    from quack.cache import get_cache_path

    try:
        _copy(directory / FOLDER, get_cache_path())
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}; QUACK_CACHE_DIR must name a directory to write to"
        ) from error


def _copy(source: Path, target: Path) -> None:
    for path in sorted(source.rglob(_KERNELS)):
        copy = target / path.relative_to(source)
        if copy.exists():
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        # Another process may be about to read it, or to write the same.
        partial = copy.with_name(f".{uuid.uuid4().hex}")
        shutil.copyfile(path, partial)
        os.replace(partial, copy)
