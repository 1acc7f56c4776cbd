"""What a batch leaves in traces: one of its own, and its share in those of the requests that rode in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from tessera import tracing
from tessera.batching.entry import Entry, P, R
from tessera.errors import TesseraError

Describe = Callable[[Sequence[P]], tracing.Attributes]
"""A batch's attributes by its payloads."""


def waited(stage: str, entries: Sequence[Entry[P, R]], ended: float) -> None:
    """The time in the queue, until ``ended``: one span for each that asked, from its first entry on."""
    if not tracing.recording():
        return
    began: dict[tracing.Reference, float] = {}
    for entry in entries:
        if entry.asked is not None:
            began[entry.asked] = min(entry.enqueued, began.get(entry.asked, ended))
    for asked, enqueued in began.items():
        tracing.past(f"{stage} queue", enqueued, ended, parent=asked)


def ran(
    stage: str,
    entries: Sequence[Entry[P, R]],
    started: float,
    ended: float,
    describe: Describe[P],
    error: Exception | None = None,
) -> None:
    """A batch as a trace of its own, linked to all that asked; and a span in the trace of each of these."""
    if not tracing.recording():
        return
    shares = Counter(entry.asked for entry in entries if entry.asked is not None)
    if not shares:
        return
    kind = None if error is None else _kind(error)
    batch = tracing.past(
        f"{stage} batch",
        started,
        ended,
        links=list(shares),
        attributes={
            "tessera.batch.entries": len(entries),
            **describe([entry.payload for entry in entries]),
        },
        error=kind,
    )
    for asked, share in shares.items():
        tracing.past(
            f"{stage} engine",
            started,
            ended,
            parent=asked,
            links=() if batch is None else (batch,),
            attributes={"tessera.batch.entries": len(entries), "tessera.batch.share": share},
            error=kind,
        )


def _kind(error: Exception) -> str:
    return error.code if isinstance(error, TesseraError) else type(error).__name__
