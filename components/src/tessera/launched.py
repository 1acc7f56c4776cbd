"""A batch on its way through an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Generic, ParamSpec, Protocol, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)


class Event(Protocol):
    """What is used of ``torch.cuda.Event``."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Launched(Generic[T_co]):
    """What ``launch`` returns: the batch may still be running.

    ``keep`` holds what the work reads and writes until the result is taken. ``tell`` calls what it is given,
    on any thread, whenever the batch may have become done; None where nobody does.
    An error has one way out: where ``done`` or ``tell`` raises, as ``torch.cuda.Event.query`` does behind a
    device-side assert, the batch counts as done and ``result`` raises it.
    """

    __slots__ = ("_done", "_error", "_keep", "_result", "_tell", "_translate")

    def __init__(
        self,
        result: Callable[[], T_co],
        *,
        done: Callable[[], bool] = lambda: True,
        keep: object = None,
        tell: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._result = result
        self._done = done
        self._keep = keep
        self._tell = tell
        self._error: Exception | None = None
        self._translate: Callable[[Exception], Exception] | None = None

    @classmethod
    def of(cls, value: T_co) -> Launched[T_co]:  # type: ignore[misc]
        """A batch that was complete when ``launch`` returned."""
        return cls(lambda: value)

    @classmethod
    def later(cls, compute: Callable[[], T_co]) -> Launched[T_co]:
        """A batch that whoever asks for its result computes; nothing is launched before that."""
        return cls(compute, tell=lambda call: None)

    @classmethod
    def after(cls, event: Event, finish: Callable[[], T_co], *, keep: object) -> Launched[T_co]:
        """A batch that is done when ``event`` has passed; ``finish`` then makes the result."""

        def result() -> T_co:
            event.synchronize()
            return finish()

        return cls(result, done=event.query, keep=keep)

    @classmethod
    def of_futures(cls, futures: Sequence[Future[R]], finish: Callable[[list[R]], T_co]) -> Launched[T_co]:
        """A batch in pieces, done when all are; raises the first error of one once all have ended."""

        def result() -> T_co:
            wait(futures)
            return finish([future.result() for future in futures])

        def tell(call: Callable[[], None]) -> None:
            for future in futures:
                future.add_done_callback(lambda _: call())

        return cls(result, done=lambda: all(future.done() for future in futures), tell=tell)

    @classmethod
    def every(cls, batches: Sequence[Launched[R]]) -> Launched[list[R]]:
        """Several batches as one: done when all are, with the result of each."""

        def tell(call: Callable[[], None]) -> None:
            for batch in batches:
                batch.when_done(call)

        return Launched(
            lambda: [batch.result() for batch in batches],
            done=lambda: all(batch.done() for batch in batches),
            tell=tell if all(batch.tells or batch.done() for batch in batches) else None,
        )

    def done(self) -> bool:
        """Whether ``result`` would wait for nothing; what is computed later it still has to compute."""
        if self._error is None:
            try:
                return self._done()
            except Exception as error:
                self._error = error
        return True

    @property
    def tells(self) -> bool:
        """Whether an end that is still to come is told."""
        return self._tell is not None

    def when_done(self, call: Callable[[], None]) -> None:
        """Call ``call``, on any thread, whenever the batch may have become done."""
        if self._tell is not None:
            try:
                self._tell(call)
            except Exception as error:
                self._error = error

    def result(self) -> T_co:
        """Wait for the batch; raises what the engine raised, whichever of its members did."""
        try:
            if self._error is not None:
                raise self._error
            return self._result()
        except Exception as error:
            if self._translate is None:
                raise
            raise self._translate(error) from error

    def map(self, function: Callable[[T_co], R]) -> Launched[R]:
        """Return the same batch with ``function`` of its result."""
        return Launched(
            lambda: function(self.result()), done=self.done, tell=self.when_done if self.tells else None
        )

    def map_error(self, translate: Callable[[Exception], Exception]) -> Launched[T_co]:
        """Have ``result`` raise ``translate`` of an error of the engine in its place; return the batch."""
        self._translate = translate
        return self


def guarded(
    launch: Callable[P, Launched[T]], translate: Callable[[Exception], Exception]
) -> Callable[P, Launched[T]]:
    """Return ``launch`` with ``translate`` of its errors, whether it raises them or its batch does."""

    def launch_guarded(*args: P.args, **kwargs: P.kwargs) -> Launched[T]:
        try:
            return launch(*args, **kwargs).map_error(translate)
        except Exception as error:
            raise translate(error) from error

    return launch_guarded
