"""Declares what a process, its engine processes and their workers send each other."""

from __future__ import annotations

from typing import Self

import msgspec
import numpy as np

from tessera import wire
from tessera.local.content import Content
from tessera.local.model_info import ModelInfo
from tessera.local.options import VectorOptions
from tessera.local.usage import Usage
from tessera.local.wanted import Wanted
from tessera.rows import Rows


class Load(msgspec.Struct, frozen=True, tag=True):
    """The first message to a worker: its flags, and what its parent found of the model."""

    flags: list[str]
    source: str


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message to an engine process; its fields as ``Engine.start`` takes them."""

    loads: list[Load]
    options: VectorOptions
    allow_private_media: bool


class Embed(msgspec.Struct, frozen=True, tag=True):
    """Asks for the rows of contents."""

    number: int
    contents: list[Content]
    wanted: Wanted


class Ask(msgspec.Struct, frozen=True, tag=True):
    number: int
    request: wire.EmbedRequest


class AskUsage(msgspec.Struct, frozen=True, tag=True):
    """Asks for ``Used``."""

    number: int


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for the answer of that number any more, and there will be none."""

    number: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """A worker can be asked."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """An engine process can be asked."""

    model: ModelInfo


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Why there is no engine, or none any more: a ``TesseraError``'s code and message."""

    code: str
    message: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Why this question has no answer, where others may have one: a ``TesseraError``'s code and message."""

    number: int
    code: str
    message: str


class OutputRows(msgspec.Struct, frozen=True):
    """The rows of one output: values as ``<f4``, bounds as ``<i8``, and indices, if any, as ``<i4``."""

    values: bytes
    bounds: bytes
    width: int
    indices: bytes | None

    @classmethod
    def of(cls, rows: Rows) -> Self:
        """Write the rows of one output; what is behind their ``norms`` is not sent."""
        return cls(
            rows.values.astype("<f4", copy=False).tobytes(),
            rows.bounds.astype("<i8", copy=False).tobytes(),
            rows.width,
            None if rows.indices is None else rows.indices.astype("<i4", copy=False).tobytes(),
        )

    def rows(self) -> Rows:
        """Read them. Raises ``ValueError`` for parts that do not go together."""
        values = np.frombuffer(self.values, "<f4").reshape(-1, self.width)
        bounds = np.frombuffer(self.bounds, "<i8")
        indices = None if self.indices is None else np.frombuffer(self.indices, "<i4")
        same = indices is None or len(indices) == len(values)
        if not len(bounds) or bounds[-1] != len(values) or not same:
            raise ValueError("bounds and indices that are not of the rows")
        return Rows(values, bounds, np.ones(len(values), np.float32), indices)


class EmbeddedRows(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``Embed``: the columns of ``Vectors``, with the rows of each output."""

    number: int
    outputs: list[OutputRows]
    tokens: list[int]
    errors: dict[int, wire.Failure]


class Replied(msgspec.Struct, frozen=True, tag=True):
    number: int
    reply: wire.EmbedReply | wire.Failure


class Used(msgspec.Struct, frozen=True, tag=True):
    number: int
    usage: Usage


First = Load | Start
Begun = Loaded | Ready
Question = Embed | Ask | AskUsage
Answer = EmbeddedRows | Replied | Used | Failed
Message = First | Begun | Question | Cancel | Answer | Refused
