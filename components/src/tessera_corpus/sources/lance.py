"""Lance tables, read by a process of their own, which one may crash, hang or fill."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from tessera.extras import absent, missing
from tessera_corpus.sources.child import spawn
from tessera_corpus.sources.lance_process import About, Answer, Asked, AskRows, OpenTable, Refused, Rows
from tessera_corpus.sources.parquet import Unread, Values
from tessera_corpus.sources.settings import Columns

T = TypeVar("T", About, Rows)

_SECONDS: Final = 120.0
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Answer).decode


class LanceTable:
    """A table that is being read; closed by whoever opened it. Its methods raise ``Unread``."""

    def __init__(self, path: Path, columns: Columns) -> None:
        """Raises ``ConfigError`` where the library is not installed, and ``Unread``."""
        if absent("lance"):
            raise missing("a Lance table", "pylance", extra="lance")
        self._process, self._connection = spawn(
            "tessera_corpus.sources.lance_process", stdin=subprocess.DEVNULL
        )
        try:
            about = self._ask(OpenTable(path=str(path), columns=columns), About)
        except BaseException:
            self.close()
            raise
        self.count = about.count
        self.names = about.names

    def batches(self) -> Iterator[Sequence[Values]]:
        """Yield all rows in order."""
        while rows := self._ask(AskRows(), Rows).values:
            yield rows

    def rows(self, first: int, most: int) -> Sequence[Values]:
        """Return rows from ``first`` on."""
        return self._ask(AskRows(first=first, most=most), Rows).values

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, asked: Asked, wanted: type[T]) -> T:
        try:
            self._connection.send_bytes(_encode(asked))
            if not self._connection.poll(_SECONDS):
                raise Unread(f"its rows were not read within {_SECONDS:g} seconds")
            answer = _decode(self._connection.recv_bytes())
        except (OSError, EOFError, msgspec.MsgspecError):
            raise Unread("its reader crashed, or would take too much memory") from None
        if isinstance(answer, Refused):
            raise Unread(answer.reason)
        if not isinstance(answer, wanted):
            raise Unread("its reader crashed")
        return answer
