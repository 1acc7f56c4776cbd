"""What a run and the process that reads its sources say to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tessera_corpus.item import Row
from tessera_corpus.sources.counted import Position
from tessera_corpus.sources.lines import Honoured
from tessera_corpus.sources.settings import SourceSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What to read, as ``open_source`` takes it: the first message, which is pickled."""

    words: Sequence[str]
    settings: SourceSettings
    honoured: Honoured


class Read(msgspec.Struct, frozen=True, tag=True):
    """The next rows, and how far the source has been read with them."""

    rows: list[Row]
    position: Position


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Why the source cannot be read: a ``TesseraError``'s code and message. The last message."""

    code: str
    message: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """All has been read: the last message, with what was passed over by its kind."""

    passed_over: dict[str, int]


Message = Read | Failed | Done
