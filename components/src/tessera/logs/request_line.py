"""The one line that a process writes about a request, while it is being filled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

Value = str | int | float | None
"""What a line's fields hold; a field that is None is left out."""


@dataclass(slots=True, eq=False)
class RequestLine:
    """``fields`` are in the order in which they are written. Belongs to one event loop."""

    request_id: str
    fields: dict[str, Value] = field(default_factory=dict)


# Tasks and threads that a request begins see its line, too.
_current: ContextVar[RequestLine | None] = ContextVar("tessera_request_line", default=None)


def current_line() -> RequestLine | None:
    """The line of the request that is being served here, None outside one."""
    return _current.get()


@contextmanager
def serving(line: RequestLine) -> Iterator[None]:
    token = _current.set(line)
    try:
        yield
    finally:
        _current.reset(token)


def note(**fields: Value) -> None:
    """Say something about the request that is being served; outside one it is lost."""
    if (line := _current.get()) is not None:
        line.fields.update(fields)


def count(name: str, more: int = 1) -> None:
    """Add to a number on the line of the request that is being served."""
    if (line := _current.get()) is not None:
        before = line.fields.get(name)
        line.fields[name] = more + (before if isinstance(before, int) else 0)
