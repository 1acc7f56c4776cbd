"""A child that answers no ``Embed``, and counts as images of its usage those that were cancelled.

An ``Embed`` of one content with a query is beyond it.
"""

from __future__ import annotations

import asyncio
import sys

from tessera.local.messages import Answer, AskUsage, Embed, First, Loaded, Question, Used
from tessera.local.parent import Died, answer_parent, belong_to_parent
from tessera.local.usage import Usage


class Waiting:
    """Implements ``Answerer``."""

    begun = Loaded()
    cancelled = 0

    async def answer(self, question: Question) -> Answer:
        if isinstance(question, AskUsage):
            return Used(question.number, Usage(images=self.cancelled))
        if isinstance(question, Embed) and question.wanted.query is not None:
            raise ZeroDivisionError("not foreseen")
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def close(self) -> None: ...


async def start(first: First, died: Died) -> Waiting:
    return Waiting()


if __name__ == "__main__":
    belong_to_parent()
    sys.exit(asyncio.run(answer_parent(int(sys.argv[1]), start)))
