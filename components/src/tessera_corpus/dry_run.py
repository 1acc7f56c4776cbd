"""What a run would be: how many items there are, and how long they take by the rates of a few of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from tessera_corpus.embedder import Embedder
from tessera_corpus.item import Embedded, Failure, Item

# Of each kind, embedded to measure: the first warm what has to be warmed.
_WARMING: Final = 16
_SAMPLE: Final = 192
_SAMPLE_BYTES: Final = 256 << 20


@dataclass(slots=True)
class Kind:
    """Items of a kind: all there are, and those embedded to measure, in seconds and values of vectors."""

    items: int = 0
    sampled: int = 0
    failed: int = 0
    seconds: float = 0.0
    values: int = 0

    @property
    def rate(self) -> float:
        """Items a second; 0 where none could be embedded."""
        return self.sampled / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Estimate:
    """``done_before`` have vectors; ``failed`` could not be read. ``value_bytes`` is one value's size."""

    value_bytes: int
    texts: Kind = field(default_factory=Kind)
    pictures: Kind = field(default_factory=Kind)
    done_before: int = 0
    failed: int = 0

    @property
    def items(self) -> int:
        return self.texts.items + self.pictures.items

    @property
    def seconds(self) -> float:
        return sum(kind.items / kind.rate for kind in (self.texts, self.pictures) if kind.rate)

    @property
    def nbytes(self) -> int:
        """Of vectors, as far as those that were embedded say it."""
        kinds = [kind for kind in (self.texts, self.pictures) if kind.sampled]
        return sum(round(kind.items * kind.values / kind.sampled) * self.value_bytes for kind in kinds)

    def lines(self) -> list[str]:
        """For people."""
        said = [
            f"{self.items:,} items to embed, {self.done_before:,} done before, {self.failed:,} unreadable"
        ]
        for name, kind in (("texts", self.texts), ("pictures", self.pictures)):
            if kind.items:
                measured = f"{kind.rate:,.1f}/s" if kind.rate else "none of those tried could be embedded"
                failed = (
                    f", {kind.failed} of {kind.failed + kind.sampled} tried failed" if kind.failed else ""
                )
                said.append(f"{kind.items:,} {name} at {measured}{failed}")
        said.append(f"{_duration(self.seconds)} and {_size(self.nbytes)} of vectors")
        return said


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.0f} seconds"
    return f"{seconds / 60:,.0f} minutes" if seconds < 7200 else f"{seconds / 3600:,.1f} hours"


def _size(nbytes: int) -> str:
    if nbytes < 1 << 20:
        return f"{nbytes / (1 << 10):,.1f} KiB"
    return f"{nbytes / (1 << 20):,.1f} MiB" if nbytes < 1 << 30 else f"{nbytes / (1 << 30):,.1f} GiB"


async def estimate(
    rows: Callable[[Callable[[str, bytes], bool]], Iterator[Item | Failure]],
    embedder: Embedder,
    done: Callable[[str, bytes], bool],
    *,
    value_bytes: int,
) -> Estimate:
    """Read the whole source, and embed the first of each kind. Nothing is written.

    ``rows`` makes the rows of what a function says is not done: pages are drawn for those alone that are
    measured.
    """
    found = Estimate(value_bytes=value_bytes)
    samples: dict[bool, list[Item]] = {True: [], False: []}
    nbytes = 0
    enough = False
    counted = 0

    def skip(id: str, content_hash: bytes) -> bool:
        nonlocal counted
        if done(id, content_hash):
            found.done_before += 1
            return True
        if enough:
            counted += 1
        return enough

    def read() -> None:
        nonlocal nbytes, enough
        pages = True
        for row in rows(skip):
            if isinstance(row, Failure):
                found.failed += 1
                continue
            if done(row.id, row.content_hash):
                found.done_before += 1
                continue
            pictures = any(not isinstance(part, str) for part in row.parts)
            pages = pictures if row.page is not None else pages
            kind = found.pictures if pictures else found.texts
            kind.items += 1
            if len(samples[pictures]) < _WARMING + _SAMPLE and nbytes < _SAMPLE_BYTES:
                samples[pictures].append(row)
                nbytes += row.nbytes
            elif row.page is not None:
                # To draw a page takes its time.
                enough = True
        # What was not drawn is what was drawn before it.
        (found.pictures if pages else found.texts).items += counted

    await asyncio.to_thread(read)
    for pictures, items in samples.items():
        if not items:
            continue
        kind = found.pictures if pictures else found.texts
        await embedder.embed(items[:_WARMING])
        measured = items[_WARMING:] or items
        started = time.monotonic()
        made = await embedder.embed(measured)
        kind.seconds = time.monotonic() - started
        good = [one for one in made if isinstance(one, Embedded)]
        kind.sampled, kind.failed = len(good), len(made) - len(good)
        kind.values = sum(rows.values.size for one in good for rows in one.rows.each())
    return found
