"""What records spans, and the one that records none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import Final, Protocol

Attributes = Mapping[str, str | bool | int | float]

Reference = object
"""Names a sampled span, of this process or another one, for links and parents; may be hashed and compared."""


class Kind(Enum):
    """OpenTelemetry's span kinds: who answers, who calls, and everything in between."""

    INTERNAL = auto()
    SERVER = auto()
    CLIENT = auto()


class Span(Protocol):
    """One piece of work that is under way."""

    @property
    def traceparent(self) -> str:
        """The span as the W3C's Trace Context writes it; empty when there is none."""
        ...

    def set(self, attributes: Attributes) -> None: ...

    def rename(self, name: str) -> None: ...

    def link(self, to: Reference) -> None: ...

    def fail(self, kind: str) -> None:
        """Mark the work as failed; ``kind`` is an error's code, never its message."""
        ...


class Tracer(Protocol):
    """Records spans. Safe to use from any thread; spans of one task or thread nest by themselves."""

    recording: bool

    def span(
        self, name: str, attributes: Attributes | None = None, kind: Kind = Kind.INTERNAL
    ) -> AbstractContextManager[Span]:
        """A span inside the one that is under way; what is raised through it marks it as failed."""
        ...

    def serve(
        self, name: str, carrier: Mapping[str, str], attributes: Attributes | None = None
    ) -> AbstractContextManager[Span]:
        """A span for work that another process asked for; ``carrier`` is what came with the request.

        A carrier that names no valid span begins a new trace.
        """
        ...

    def past(
        self,
        name: str,
        started: float,
        ended: float,
        *,
        parent: Reference | None = None,
        links: Sequence[Reference] = (),
        attributes: Attributes | None = None,
        error: str | None = None,
    ) -> Reference | None:
        """Record work that is over, between two readings of ``time.perf_counter``.

        Without a parent it is a trace of its own, which is kept when one of its links is.
        """
        ...

    def carrier(self) -> dict[str, str]:
        """What a request to another process carries, so that its spans nest in the one under way here."""
        ...

    def here(self) -> Reference | None:
        """The span under way, or None when it is not kept."""
        ...

    def trace_id(self) -> str:
        """The trace under way in lower-case hex, empty when it is not kept."""
        ...

    def annotate(self, attributes: Attributes) -> None:
        """Add to the span under way."""
        ...

    def close(self, timeout: float) -> None:
        """Export what is left, for at most ``timeout`` seconds."""
        ...


class _NoSpan:
    """A span and its context manager in one, without any state."""

    traceparent: Final = ""

    def __enter__(self) -> _NoSpan:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def set(self, attributes: Attributes) -> None:
        pass

    def rename(self, name: str) -> None:
        pass

    def link(self, to: Reference) -> None:
        pass

    def fail(self, kind: str) -> None:
        pass


_NO_SPAN: Final = _NoSpan()


class NullTracer:
    """Records nothing; needs no library."""

    recording = False

    def span(
        self, name: str, attributes: Attributes | None = None, kind: Kind = Kind.INTERNAL
    ) -> AbstractContextManager[Span]:
        return _NO_SPAN

    def serve(
        self, name: str, carrier: Mapping[str, str], attributes: Attributes | None = None
    ) -> AbstractContextManager[Span]:
        return _NO_SPAN

    def past(
        self,
        name: str,
        started: float,
        ended: float,
        *,
        parent: Reference | None = None,
        links: Sequence[Reference] = (),
        attributes: Attributes | None = None,
        error: str | None = None,
    ) -> Reference | None:
        return None

    def carrier(self) -> dict[str, str]:
        return {}

    def here(self) -> Reference | None:
        return None

    def trace_id(self) -> str:
        return ""

    def annotate(self, attributes: Attributes) -> None:
        pass

    def close(self, timeout: float) -> None:
        pass
