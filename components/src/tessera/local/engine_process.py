"""``python -m tessera.local.engine_process FD``: an engine for the process that started this one.

It ends when that does, however that ends.
"""

from __future__ import annotations

from tessera.garbage import quick_imports

with quick_imports():
    import sys
    from collections.abc import Sequence
    from functools import partial
    from typing import Final

    import uvloop

    from tessera import wire
    from tessera.errors import ProtocolError
    from tessera.local.engine import Engine
    from tessera.local.messages import (
        Answer,
        AskUsage,
        Embed,
        EmbeddedRows,
        First,
        OutputRows,
        Question,
        Ready,
        Start,
        Used,
    )
    from tessera.local.parent import Died, answer_parent, belong_to_parent
    from tessera.logs import log_as, log_settings
    from tessera.process_exit import leave

# The loop would wait for threads that make tokens, 5 ms by default each time.
_SWITCH_SECONDS: Final = 0.0002


class EngineAnswerer:
    """Implements ``Answerer`` with an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.begun = Ready(engine.model)

    @classmethod
    async def start(cls, first: First, died: Died, *, log: Sequence[str]) -> EngineAnswerer:
        """Raises as ``Engine.start``."""
        if not isinstance(first, Start):
            raise ProtocolError(f"an engine process was sent {type(first).__name__} first")
        private = first.allow_private_media
        return cls(await Engine.start(first.loads, first.options, died, log=log, allow_private_media=private))

    async def answer(self, question: Question) -> Answer:
        """Raises ``EngineDead``."""
        if isinstance(question, AskUsage):
            return Used(question.number, await self._engine.usage())
        assert isinstance(question, Embed)
        vectors = await self._engine.embed(question.contents, question.wanted)
        return EmbeddedRows(
            number=question.number,
            outputs=[OutputRows.of(rows) for rows in vectors.rows.each()],
            tokens=list(vectors.tokens),
            errors={place: wire.Failure.of(error) for place, error in vectors.errors.items()},
        )

    async def close(self) -> None:
        await self._engine.close()


def main() -> int:
    belong_to_parent()
    descriptor, *log = sys.argv[1:]
    log_as("engine", log_settings(log))
    sys.setswitchinterval(_SWITCH_SECONDS)
    return uvloop.run(answer_parent(int(descriptor), partial(EngineAnswerer.start, log=log)))


if __name__ == "__main__":
    leave(main())
