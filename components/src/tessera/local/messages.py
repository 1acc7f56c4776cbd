"""Declares what a process, its engine processes and their workers send each other."""

from __future__ import annotations

import msgspec

from tessera import wire
from tessera.local.content import Content
from tessera.local.model_info import ModelInfo
from tessera.local.options import VectorOptions
from tessera.local.usage import Usage


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
    """Asks for the rows of contents; with a ``query`` for each one's score, its one row of one value."""

    number: int
    contents: list[Content]
    query: Content | None


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


class EmbeddedRows(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``Embed``: the columns of ``Vectors``, with the bytes of its rows as ``<f4``."""

    number: int
    rows: bytes
    counts: list[int]
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
