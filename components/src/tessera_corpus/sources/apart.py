"""Sources that another process reads."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping

import msgspec

from tessera.errors import Unavailable, from_code
from tessera_corpus.item import Row, Source
from tessera_corpus.sources.child import spawn
from tessera_corpus.sources.choice import open_source
from tessera_corpus.sources.counted import Position
from tessera_corpus.sources.messages import Done, Failed, Message, Sources


class Apart:
    """What ``open_source`` gives, read by a child process.

    To read a line takes 25 to 40 us of one interpreter. The run's own has vectors to write, and a card makes
    ten thousand a second of short texts.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._position = Position(read=0)
        self._passed_over: Mapping[str, int] = {}
        self._here: Source | None = None

    def position(self) -> Position:
        return self._position

    def gives(self, id: str, place: str, page: int | None) -> bool:
        if self._here is None:
            self._here = open_source(self._sources.words, self._sources.settings, self._sources.honoured)
        return self._here.gives(id, place, page)

    def passed_over(self) -> Mapping[str, int]:
        return self._passed_over

    def rows(self) -> Iterator[Row]:
        """Raises what the source does, and ``Unavailable`` where the child ends before it."""
        decode = msgspec.msgpack.Decoder(Message).decode
        # Standard input is the child's, too.
        child, ours = spawn("tessera_corpus.sources.read_process")
        with ours:
            try:
                ours.send(self._sources)
                while not isinstance(message := decode(ours.recv_bytes()), Done):
                    if isinstance(message, Failed):
                        raise from_code(message.code, message.message)
                    yield from message.rows
                    self._position = message.position
                self._passed_over = message.passed_over
            except (EOFError, ConnectionError):
                raise Unavailable(f"the process that reads the sources {_end_of(child.wait())}") from None
            finally:
                child.kill()
                child.wait()


def _end_of(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
