"""``python -m tessera_corpus.sources.read_process FD``: reads sources for the run that started it."""

from __future__ import annotations

from tessera.garbage import quick_imports

with quick_imports():
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from typing import Final

    import msgspec

    from tessera.errors import TesseraError
    from tessera_corpus.item import Row, size_of
    from tessera_corpus.sources.child import run
    from tessera_corpus.sources.choice import open_source
    from tessera_corpus.sources.messages import Done, Failed, Message, Read, Sources

# Of a message, but for a row that is larger by itself.
_ROWS: Final = 64
_BYTES: Final = 1 << 20


def serve(connection: Connection) -> None:
    """Send all rows, as fast as the run takes them; raises ``OSError`` when it has gone."""
    encode = msgspec.msgpack.Encoder().encode
    sources: Sources = connection.recv()
    try:
        source = open_source(sources.words, sources.settings, sources.honoured)
        for rows in _some(source.rows()):
            connection.send_bytes(encode(Read(rows, source.position())))
        last: Message = Done(dict(source.passed_over()))
    except TesseraError as error:
        last = Failed(error.code, error.message)
    connection.send_bytes(encode(last))


def _some(rows: Iterator[Row]) -> Iterator[list[Row]]:
    found: list[Row] = []
    nbytes = 0
    for row in rows:
        found.append(row)
        nbytes += size_of(row)
        if len(found) >= _ROWS or nbytes >= _BYTES:
            yield found
            found, nbytes = [], 0
    if found:
        yield found


if __name__ == "__main__":
    run(serve)
