"""What rows name: files below one directory, and URLs under the service's media policy."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tessera.errors import MediaFetchError
from tessera.frontend.media import ImageLimits, MediaBudget, MediaPolicy
from tessera.frontend.media.loader import decode, read_local
from tessera.tasks import Deadline
from tessera_corpus.sources.parquet import Reader
from tessera_corpus.sources.settings import Columns

if TYPE_CHECKING:
    from tessera.frontend.media.fetch import Fetcher

_PARAM: Final = "image"
# Such as s3://: a file may be called anything else.
_OTHER: Final = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_WEB: Final = ("http://", "https://")


class Media:
    """Reads what is named; blocks, and is called by several threads."""

    def __init__(self, root: Path | None, policy: MediaPolicy, max_bytes: int) -> None:
        self._root = root
        self._policy = policy
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fetcher: Fetcher | None = None
        self._tables: Reader | None = None

    def tables(self, columns: Columns) -> Reader:
        """Return the reader of all tables, whose process ends with this object."""
        with self._lock:
            if self._tables is None:
                self._tables = Reader(columns, self._max_bytes)
            return self._tables

    def read(self, name: str) -> bytes:
        """The bytes of a data, http, https or file URL, or of a path below the root; of nothing else.

        Raises ``RequestError`` subclasses that say why there are none.
        """
        start = name[:8].lower()
        if start.startswith("data:"):
            return decode(name, param=_PARAM, max_bytes=self._max_bytes)
        if start.startswith(_WEB):
            return self._fetch(name)
        if (scheme := _OTHER.match(name)) is not None:
            raise MediaFetchError(
                f"image: {scheme[0]} is not read: only paths, and URLs of http, https and data", param=_PARAM
            )
        if self._root is None:
            raise MediaFetchError(
                "image: a path, and --root does not say below which directory", param=_PARAM
            )
        if not start.startswith(("file://", "/")):
            name = str(self._root.absolute() / name)
        return read_local(name, root=self._root, max_bytes=self._max_bytes, param=_PARAM)

    def close(self) -> None:
        with self._lock:
            loop, fetcher = self._loop, self._fetcher
            self._loop = self._fetcher = None
            tables, self._tables = self._tables, None
        if tables is not None:
            tables.close()
        if loop is not None and fetcher is not None:
            asyncio.run_coroutine_threadsafe(fetcher.close(), loop).result()
            loop.call_soon_threadsafe(loop.stop)

    def _fetch(self, url: str) -> bytes:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="fetch", daemon=True).start()
            loop = self._loop

        async def get() -> bytes:
            if self._fetcher is None:
                # Its libraries are a quarter of a second of a run's start, and most runs fetch nothing.
                from tessera.frontend.media.fetch import Fetcher

                self._fetcher = Fetcher(self._policy, ImageLimits(max_bytes=self._max_bytes))
            budget = MediaBudget(self._max_bytes)
            deadline = Deadline.after(self._policy.timeout)
            return await self._fetcher.get(url, param=_PARAM, deadline=deadline, budget=budget)

        return asyncio.run_coroutine_threadsafe(get(), loop).result()
