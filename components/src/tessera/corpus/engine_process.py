"""``python -m tessera.corpus.engine_process FD``: an engine for the run that started this process.

It ends when the run does, however that ends.
"""

from __future__ import annotations

from tessera.garbage import quick_imports

with quick_imports():
    import sys
    from collections.abc import Sequence
    from functools import partial
    from typing import Final

    import uvloop

    from tessera.corpus.engine import Engine
    from tessera.corpus.frames import Answer, Embed, First, Made, Question, Ready, Start, Tell, Used
    from tessera.corpus.parent import Died, answer_parent, belong_to_parent
    from tessera.errors import ProtocolError
    from tessera.logs import log_as, log_settings
    from tessera.process_exit import leave

# The loop would wait for threads that make tokens, 5 ms by default each time.
_SWITCH_SECONDS: Final = 0.0002


class Served:
    """Implements ``Answerer`` with an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.begun = Ready(engine.served)

    @classmethod
    async def start(cls, first: First, died: Died, *, log: Sequence[str]) -> Served:
        """Raises as ``Engine.start``."""
        if not isinstance(first, Start):
            raise ProtocolError(f"an engine process was sent {type(first).__name__} first")
        return cls(await Engine.start(first.loads, first.vectors, died, log=log))

    async def answer(self, question: Question) -> Answer:
        """Raises ``EngineDead``."""
        if isinstance(question, Tell):
            return Used(question.number, await self._engine.usage())
        assert isinstance(question, Embed)
        found = await self._engine.embed(question.items)
        return Made(
            number=question.number,
            rows=found.rows.astype("<f4", copy=False).tobytes(),
            counts=list(found.counts),
            tokens=list(found.tokens),
            reasons=dict(found.reasons),
        )

    async def close(self) -> None:
        await self._engine.close()


def main() -> int:
    belong_to_parent()
    descriptor, *log = sys.argv[1:]
    log_as("engine", log_settings(log))
    sys.setswitchinterval(_SWITCH_SECONDS)
    return uvloop.run(answer_parent(int(descriptor), partial(Served.start, log=log)))


if __name__ == "__main__":
    leave(main())
