"""One request's pieces of work, some of which wait for room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from tessera.errors import Overloaded, TesseraError

F = TypeVar("F", bound=asyncio.Future)  # type: ignore[type-arg]

# How long a piece waits before it asks for room again when nothing of its own request is under way.
_PAUSE_SECONDS = 0.01


class Submission(Generic[F]):
    """Collects futures and errors in order; what is unfinished of them stays within a window.

    A request is refused as a whole or not at all: once its first piece is in, the others wait for room for as
    long as the request has time.
    """

    def __init__(self) -> None:
        self.pieces: list[F | TesseraError] = []
        self._unfinished: dict[F, int] = {}
        self._size = 0
        self._begun = False

    async def add(self, begin: Callable[[], F], size: int, *, window: int) -> None:
        """Begin a piece of that size; raises ``Overloaded`` when the first one is refused."""
        while self._unfinished and self._size + size > window:
            await self._one()
        while True:
            try:
                piece = begin()
                break
            except Overloaded:
                if not self._begun:
                    raise
            await (self._one() if self._unfinished else asyncio.sleep(_PAUSE_SECONDS))
        self._begun = True
        self.pieces.append(piece)
        self._unfinished[piece] = size
        self._size += size

    def fail(self, error: TesseraError) -> None:
        self.pieces.append(error)

    async def finish(self) -> None:
        """Wait for all of them; their errors stay in them."""
        if self._unfinished:
            await asyncio.wait(self._unfinished)

    def abandon(self) -> None:
        """Cancel whatever is not done."""
        for piece in self.pieces:
            if not isinstance(piece, TesseraError) and not piece.cancel() and not piece.cancelled():
                # Nobody will read the outcome, which asyncio would complain about.
                piece.exception()

    async def _one(self) -> None:
        done, _ = await asyncio.wait(self._unfinished, return_when=asyncio.FIRST_COMPLETED)
        self._size -= sum(self._unfinished.pop(piece) for piece in done)
