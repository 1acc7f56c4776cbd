"""Starts the workers of one card, each a child process: one that runs both stages, or one for each stage."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Self

from tessera import wire
from tessera.errors import EngineDead
from tessera.launch.folders import Folders
from tessera.local.child import A, Child, ChildLost
from tessera.local.messages import Ask, AskUsage, Load, Question, Replied, Used
from tessera.local.parent import Died
from tessera.local.usage import Usage


class Workers:
    """The last of them embeds; an encode worker before it is found by it, as in a service."""

    def __init__(self, children: Sequence[Child], folders: Folders | None) -> None:
        self._children = children
        self._folders = folders

    @classmethod
    async def start(cls, loads: Sequence[Load], died: Died, log: Sequence[str]) -> Self:
        """``died`` is told of the first that ends. Raises what one of them refuses to begin for."""
        folders = Folders() if len(loads) > 1 else None
        environment = dict(os.environ)
        if folders is not None:
            environment["DYN_FILE_KV"] = str(folders.make("discovery"))
        kept = [] if folders is None else [folders.descriptor]
        module = "tessera.local.worker_process"
        starting = [
            Child.start(module, load, environment=environment, words=log, kept=kept) for load in loads
        ]
        started = await asyncio.gather(*starting, return_exceptions=True)
        children = [child for child in started if isinstance(child, Child)]
        workers = cls(children, folders)
        if refused := [error for error in started if isinstance(error, BaseException)]:
            await workers.close()
            raise refused[0]
        for child in children:
            child.lost = lambda why: workers._lost(why, died)
        return workers

    async def ask(self, request: wire.Request) -> wire.Reply:
        """Raises ``EngineDead``."""
        assert isinstance(request, wire.EmbedRequest)
        return (await _answer(self._children[-1], lambda number: Ask(number, request), Replied)).reply

    async def usage(self) -> Usage:
        """Of all of them. Raises ``EngineDead``."""
        total = Usage()
        for child in self._children:
            total += (await _answer(child, AskUsage, Used)).usage
        return total

    async def close(self) -> None:
        """What asks another ends before it."""
        for child in reversed(self._children):
            await child.close()
        self._remove_folders()

    def _lost(self, why: str, died: Died) -> None:
        # This process leaves at once, and nobody closes anything then.
        self._remove_folders()
        died(EngineDead(why))

    def _remove_folders(self) -> None:
        if self._folders is not None:
            self._folders.remove()
            self._folders = None


async def _answer(child: Child, question: Callable[[int], Question], kind: type[A]) -> A:
    try:
        return await child.ask(question, kind)
    except ChildLost as lost:
        raise EngineDead(f"{lost}") from lost
