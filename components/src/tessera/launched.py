"""A batch on its way through an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)


class Event(Protocol):
    """What is used of ``torch.cuda.Event``."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Launched(Generic[T_co]):
    """What ``launch`` returns: the batch may still be running.

    ``keep`` holds what the work reads and writes until the result is taken.
    """

    __slots__ = ("_done", "_keep", "_result")

    def __init__(
        self, result: Callable[[], T_co], *, done: Callable[[], bool] = lambda: True, keep: object = None
    ) -> None:
        self._result = result
        self._done = done
        self._keep = keep

    @classmethod
    def of(cls, value: T_co) -> Launched[T_co]:  # type: ignore[misc]
        """A batch that was complete when ``launch`` returned."""
        return cls(lambda: value)

    @classmethod
    def after(cls, event: Event, finish: Callable[[], T_co], *, keep: object) -> Launched[T_co]:
        """A batch that is done when ``event`` has passed; ``finish`` then makes the result."""

        def result() -> T_co:
            event.synchronize()
            return finish()

        return cls(result, done=event.query, keep=keep)

    @classmethod
    def every(cls, batches: Sequence[Launched[R]]) -> Launched[list[R]]:
        """Several batches as one: done when all are, with the result of each."""
        return Launched(
            lambda: [batch.result() for batch in batches],
            done=lambda: all(batch.done() for batch in batches),
        )

    def done(self) -> bool:
        """Whether ``result`` would return at once."""
        return self._done()

    def result(self) -> T_co:
        """Wait for the batch; raises what the engine raised."""
        return self._result()

    def map(self, function: Callable[[T_co], R]) -> Launched[R]:
        """The same batch with ``function`` of its result."""
        return Launched(lambda: function(self.result()), done=self.done)

    def map_error(self, translate: Callable[[Exception], Exception]) -> Launched[T_co]:
        """The same batch; in place of an error of the engine it raises what ``translate`` makes of it."""

        def result() -> T_co:
            try:
                return self.result()
            except Exception as error:
                raise translate(error) from error

        return Launched(result, done=self.done)
