"""TensorRT's timing cache in a file that several builds may share."""

from __future__ import annotations

import fcntl
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tessera.engine.compiled.flavours import Progress

_MAGIC = b"tessera timing cache, "


class TimingCache:
    """Holds the file's lock while it is entered; without a path it does nothing.

    ``version`` begins the file: a cache of another version is replaced, because TensorRT takes one without a
    word and then finds nothing in it.
    """

    def __init__(self, path: Path | None, version: str) -> None:
        self._path = path
        self._header = _MAGIC + version.encode() + b"\n"
        self._file: IO[bytes] | None = None

    def __enter__(self) -> TimingCache:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+b")
            fcntl.flock(self._file, fcntl.LOCK_EX)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def attach(self, config: Any, progress: Progress) -> None:
        if self._file is None:
            return
        self._file.seek(0)
        content = self._file.read()
        known = content.startswith(self._header)
        if content and not known:
            progress(f"{self._path}: of another version, begun anew")
        cache = config.create_timing_cache(content[len(self._header) :] if known else b"")
        if cache is None or not config.set_timing_cache(cache, False):
            progress(f"{self._path}: not for this machine, begun anew")
            config.set_timing_cache(config.create_timing_cache(b""), False)

    def keep(self, config: Any) -> None:
        if self._file is None:
            return
        cache = config.get_timing_cache()
        if cache is None:
            return
        self._file.seek(0)
        self._file.truncate()
        self._file.write(self._header)
        self._file.write(cache.serialize())
