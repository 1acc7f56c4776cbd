"""``python -m tessera.worker.together FILE``: whether the workers of a host fit into its memory together.

The launcher asks before it starts any of several models. The file is a ``Host`` in JSON; what is written to
standard output is one JSON object: a ``Fit``, or ``error`` alone for what does not fit or cannot be opened.
Every worker is told the share that comes out, by which it chooses its own sizes.
"""

from __future__ import annotations

from tessera.garbage import quick_imports

with quick_imports():
    import sys
    from collections.abc import Callable, Mapping, Sequence
    from dataclasses import dataclass
    from pathlib import Path
    from typing import Any, Final

    import msgspec

    from tessera.defaults import GIB
    from tessera.errors import ConfigError, TesseraError
    from tessera.logs import log_as, log_settings
    from tessera.models import Model, open_model
    from tessera.process_exit import leave
    from tessera.worker.memory import MemoryAccount, Use
    from tessera.worker.settings import WorkerSettings, parse
    from tessera.worker.sizes import OF_CARD, PARTS, Room, account_of, precise, share_of, sized_at

_HOST: Final = None
# A card has a little less for programs than its driver says.
_ROUNDING: Final = 1.01
_WIDTH: Final = 36


class Takes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the host's memory and of a card's that a worker takes."""

    host: int
    card: int = 0


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A worker: its flags, and the entry of its card, empty without one.

    ``source`` is what the launcher found of the model. ``takes`` is what one that runs has been counted with.
    """

    name: str
    arguments: list[str]
    card: str = ""
    source: str = ""
    takes: Takes | None = None


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Its workers, its memory and what of it is free, and the memory of its cards by their entries; in bytes.

    A card of which that is not known is not counted on.
    """

    workers: list[Asked]
    nbytes: int
    free: int
    cards: dict[str, int] = {}


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker takes, and its shares of the two memories; 0 for what is not known."""

    takes: Takes
    host_share: float
    card_share: float


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """What each worker is given, in the order in which they were asked about, and a table of it."""

    workers: list[Given]
    table: str


@dataclass(frozen=True, slots=True)
class _Worker:
    """``accounts`` are for sizes that shrink, one for each of ``PARTS``; none for a worker that runs."""

    asked: Asked
    accounts: Sequence[MemoryAccount] = ()

    def needed(self, at: int, *, on_card: bool) -> int:
        """Bytes of one of the two memories, with the sizes of one of the ``PARTS``."""
        if (takes := self.asked.takes) is not None:
            return takes.card if on_card else takes.host
        return sum(use.nbytes for use in self._uses(at, on_card=on_card))

    def largest(self, on_host: int, on_card: int | None) -> int:
        """Which of the ``PARTS`` fits into so many bytes, as the worker itself will find; 0 where it runs."""
        for at in range(len(self.accounts)):
            if self.needed(at, on_card=False) > on_host:
                continue
            if on_card is None or self.needed(at, on_card=True) <= on_card:
                return at
        return 0

    def line(self, at: int, *, on_card: bool) -> str:
        uses = [] if self.asked.takes else self._uses(at, on_card=on_card)
        parts = ", ".join(f"{use.what} {use.nbytes / GIB:.2f}" for use in uses) or "runs already"
        return f"{self.asked.name:<{_WIDTH}} {self.needed(at, on_card=on_card) / GIB:8.2f} GiB: {parts}"

    def _uses(self, at: int, *, on_card: bool) -> list[Use]:
        return [use for use in self.accounts[at].uses if (use.device != "cpu") == on_card]


def fit(
    host: Host,
    *,
    parsed: Callable[[Asked], WorkerSettings] = lambda asked: parse(asked.arguments, source=asked.source),
    opened: Callable[[WorkerSettings], Model],
    room: Callable[[WorkerSettings], Room] = lambda settings: Room(share=share_of(settings)),
) -> Fit:
    """Share the memory among the workers by what they need.

    Each gets what the largest of its sizes take where all of that fits. Else each gets what its least take,
    and of the rest in proportion to what more it could use. Raises ``ConfigError``, with the table, where the
    least do not fit, and for a worker that could not be started.
    """
    workers = [_worker(asked, parsed, opened, room) for asked in host.workers]
    # What others on this host have taken is not there to be shared.
    running = sum(each.takes.host for each in host.workers if each.takes is not None)
    limits: dict[str | None, int] = {_HOST: min(host.nbytes, running + host.free)}
    limits |= {card: int(nbytes * OF_CARD) for card, nbytes in host.cards.items() if nbytes}
    least = [len(PARTS) - 1] * len(workers)
    if any(_needed(workers, memory, least) > limit for memory, limit in limits.items()):
        raise ConfigError(
            "the models do not fit into memory together; serve fewer or smaller ones, or lower "
            "max_batch_cost, slab_mb or --multimodal-embedding-cache-capacity-gb:\n"
            f"{_table(limits, workers, least)}"
        )
    allotted = {memory: _allotted(workers, memory, limit) for memory, limit in limits.items()}
    own = [
        (allotted[_HOST][index], allotted.get(worker.asked.card, {}).get(index))
        for index, worker in enumerate(workers)
    ]
    chosen = [worker.largest(*each) for worker, each in zip(workers, own, strict=True)]
    given = [_given(*each, host) for each in zip(workers, chosen, own, strict=True)]
    return Fit(workers=given, table=_table(limits, workers, chosen))


def _worker(
    asked: Asked,
    parsed: Callable[[Asked], WorkerSettings],
    opened: Callable[[WorkerSettings], Model],
    room: Callable[[WorkerSettings], Room],
) -> _Worker:
    if asked.takes is not None:
        return _Worker(asked)
    try:
        given = parsed(asked)
        model, own = opened(given), room(given)
        settings = precise(given, model, own.place)
        sizes = [sized_at(settings, model, own, part) for part in PARTS]
        return _Worker(asked, [account_of(each, model, own.place) for each in sizes])
    except TesseraError as error:
        raise ConfigError(f"{asked.name}: {error.message}") from error


def _on(worker: _Worker, memory: str | None) -> bool:
    return memory is _HOST or memory == worker.asked.card


def _needed(workers: Sequence[_Worker], memory: str | None, sizes: Sequence[int]) -> int:
    pairs = zip(workers, sizes, strict=True)
    return sum(worker.needed(at, on_card=memory is not _HOST) for worker, at in pairs if _on(worker, memory))


def _allotted(workers: Sequence[_Worker], memory: str | None, limit: int) -> dict[int, int]:
    """Bytes of a memory for each worker that is there, by its place in the list."""
    on_card = memory is not _HOST
    there = {index: worker for index, worker in enumerate(workers) if _on(worker, memory)}
    least = {index: worker.needed(len(PARTS) - 1, on_card=on_card) for index, worker in there.items()}
    more = {index: worker.needed(0, on_card=on_card) - least[index] for index, worker in there.items()}
    wanted, left = sum(more.values()), limit - sum(least.values())
    part = 1.0 if wanted <= left else left / wanted
    return {index: least[index] + int(more[index] * part) for index in there}


def _given(worker: _Worker, at: int, own: tuple[int, int | None], host: Host) -> Given:
    on_host, on_card = own
    return Given(
        takes=Takes(host=worker.needed(at, on_card=False), card=worker.needed(at, on_card=True)),
        host_share=_share(on_host, host.nbytes),
        card_share=_share(on_card / OF_CARD * _ROUNDING, host.cards[worker.asked.card]) if on_card else 0.0,
    )


def _share(nbytes: float, of: int) -> float:
    """Rounded up, for no size to be lost to that."""
    return min(1.0, (int(nbytes / of * 10_000) + 1) / 10_000)


def _table(limits: Mapping[str | None, int], workers: Sequence[_Worker], sizes: Sequence[int]) -> str:
    """Who takes what of each memory, with the sizes of each worker."""
    lines = []
    for memory, limit in limits.items():
        lines.append(f"  {f'GPU {memory}' if memory else 'this host'}, of {limit / GIB:.2f} GiB:")
        for worker, at in zip(workers, sizes, strict=True):
            if _on(worker, memory):
                lines.append(f"    {worker.line(at, on_card=memory is not _HOST)}")
        needed = _needed(workers, memory, sizes)
        verdict = "fits" if needed <= limit else "does not fit"
        lines.append(f"    {'in all':<{_WIDTH}} {needed / GIB:8.2f} GiB: {verdict}")
    return "\n".join(lines)


def main() -> int:
    """The status is 1 after an error."""
    log_as("launch", log_settings())
    try:
        host = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Host)
        # Workers of a model are many, and one at full size takes half a second to open.
        found: dict[tuple[Path, str], Model] = {}

        def opened(given: WorkerSettings) -> Model:
            key = given.model_path, repr(given.model_options)
            if key not in found:
                found[key] = open_model(given.model_path, given.model_options)
            return found[key]

        said: Any = fit(host, opened=opened)
    except TesseraError as error:
        said = {"error": error.message}
    print(msgspec.json.encode(said).decode())
    return int(isinstance(said, dict))


if __name__ == "__main__":
    leave(main())
