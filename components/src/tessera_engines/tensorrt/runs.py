"""The runs of a text batch: how it is cut to an engine's profiles, and the int32 inputs of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from tessera.engine.batch import TextBatch
from tessera.errors import EngineFailed
from tessera_engines.compiled.spec import Layout, Profile

Int32Array = npt.NDArray[np.int32]

# Numbers of tokens are rounded up to a multiple of this.
_LEAST_TOKENS = 16
# The cost of one more run, in tokens of padding; an estimate, not measured.
_RUN_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Run:
    """Sequences of a batch, by number, that go through the engine together.

    ``sequences`` and ``tokens`` are the sizes that the engine is given: tokens of each sequence when the
    layout is padded, of all together when it is packed.
    """

    members: tuple[int, ...]
    profile: int
    sequences: int
    tokens: int


class Sizes:
    """Chooses runs and their sizes.

    Up to ``coarse`` tokens, sizes are rounded up to powers of two, so that a few recorded graphs serve all.
    """

    def __init__(self, profiles: Sequence[Profile], layout: Layout, *, coarse: int) -> None:
        # Smallest first: an engine is tuned to each profile's own sizes.
        self._order = sorted(range(len(profiles)), key=lambda number: _volume(profiles[number], layout))
        self._profiles = profiles
        self._layout = layout
        self._coarse = coarse

    def cut(self, lengths: Sequence[int], rows: Sequence[int]) -> list[Run]:
        """Cut sequences of these lengths, with ``rows`` vision rows each, into runs.

        Padded sequences go with others of similar length. As many go together as a profile takes, the longest
        first.
        """
        return [run for group in self._groups(lengths) for run in self._runs(group, lengths, rows)]

    def _groups(self, lengths: Sequence[int]) -> list[list[int]]:
        """Numbers of sequences that are worth running together; the longest come first."""
        numbers = sorted(range(len(lengths)), key=lambda number: -lengths[number])
        if self._layout is Layout.PACKED:
            return [numbers]
        classes = [
            list(members) for _, members in groupby(numbers, key=lambda number: _power(lengths[number]))
        ]
        # The cheapest way to join neighbouring classes, by dynamic programming from the shortest one on.
        cheapest: list[tuple[int, list[list[int]]]] = [(0, [])]
        for start in reversed(range(len(classes))):
            choices = []
            group: list[int] = []
            for end in range(start, len(classes)):
                group = group + classes[end]
                after, groups = cheapest[len(classes) - 1 - end]
                choices.append((len(group) * lengths[group[0]] + _RUN_TOKENS + after, [group, *groups]))
            cheapest.append(min(choices, key=lambda choice: choice[0]))
        return cheapest[-1][1]

    def _runs(self, group: list[int], lengths: Sequence[int], rows: Sequence[int]) -> Iterator[Run]:
        left = group
        while left:
            best = self._fit(tuple(sorted(left)), lengths, rows)
            for count in range(1, len(left)) if best is None else ():
                found = self._fit(tuple(sorted(left[:count])), lengths, rows)
                if found is None:
                    break
                best = found
            if best is None:
                raise EngineFailed(f"no profile of the engine takes a sequence of {lengths[left[0]]} tokens")
            yield best
            left = left[len(best.members) :]

    def coarse(self) -> list[tuple[list[int], Run]]:
        """Every size up to the coarse limit that a profile takes: a run, and lengths that round up to it."""
        most = max(profile.sequences.max for profile in self._profiles)
        found: dict[tuple[int, int, int], tuple[list[int], Run]] = {}
        for tokens in _powers(_LEAST_TOKENS, self._coarse):
            for count in _powers(1, min(most, tokens)):
                if self._layout is Layout.PADDED and count * tokens > self._coarse:
                    continue
                lengths = [tokens // count if self._layout is Layout.PACKED else tokens] * count
                run = self._fit(tuple(range(count)), lengths, [0] * count)
                if run is not None:
                    found[run.profile, run.sequences, run.tokens] = (lengths, run)
        return list(found.values())

    def _fit(self, members: tuple[int, ...], lengths: Sequence[int], rows: Sequence[int]) -> Run | None:
        own = [lengths[member] for member in members]
        tokens = sum(own) if self._layout is Layout.PACKED else max(own)
        images = sum(rows[member] for member in members)
        for number in self._order:
            profile = self._profiles[number]
            if (
                len(members) > profile.sequences.max
                or tokens > profile.tokens.max
                or images > profile.rows.max
            ):
                continue
            sequences, padded = self._rounded(len(members), tokens)
            return Run(
                members,
                number,
                sequences=min(max(sequences, profile.sequences.min), profile.sequences.max),
                tokens=min(max(padded, profile.tokens.min), profile.tokens.max),
            )
        return None

    def _rounded(self, sequences: int, tokens: int) -> tuple[int, int]:
        wide, long = _power(sequences), max(_LEAST_TOKENS, _power(tokens))
        if long * (wide if self._layout is Layout.PADDED else 1) <= self._coarse:
            return wide, long
        return sequences, -(-tokens // _LEAST_TOKENS) * _LEAST_TOKENS


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << max(size - 1, 0).bit_length()


def _powers(first: int, last: int) -> list[int]:
    return [1 << number for number in range(first.bit_length() - 1, last.bit_length())]


def _volume(profile: Profile, layout: Layout) -> int:
    return profile.tokens.max * (profile.sequences.max if layout is Layout.PADDED else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """One run's int32 inputs as the engine takes them, by the names of its bindings.

    ``rows`` are the ranges of the batch's vision rows that come into the run's own, one after another.
    """

    arrays: dict[str, Int32Array]
    rows: tuple[tuple[int, int], ...]


class BatchInputs:
    """Makes the inputs of a batch's runs; finds each sequence's vision rows once."""

    def __init__(self, batch: TextBatch, layout: Layout) -> None:
        self._batch = batch
        self._layout = layout
        # ``vision_index`` ascends, so that each sequence's rows lie together.
        self._first_row = np.searchsorted(batch.vision_index, batch.cu_seqlens).astype(np.int32)
        self._row_map = np.full(len(batch.input_ids), -1, np.int32)
        self._row_map[batch.vision_index] = np.arange(len(batch.vision_index), dtype=np.int32)

    @property
    def rows(self) -> list[int]:
        """Vision rows of each sequence."""
        return [int(count) for count in np.diff(self._first_row)]

    def of(self, run: Run) -> RunInputs:
        batch, bounds = self._batch, self._batch.cu_seqlens
        rows, offset = [], 0
        pieces = []
        for member in run.members:
            start, end = int(self._first_row[member]), int(self._first_row[member + 1])
            part = slice(int(bounds[member]), int(bounds[member + 1]))
            places = self._row_map[part]
            pieces.append((batch.input_ids[part], np.where(places < 0, places, places - start + offset)))
            if start < end:
                rows.append((start, end))
                offset += end - start
        lengths = [batch.lengths[member] for member in run.members]
        make = self._packed if self._layout is Layout.PACKED else self._padded
        return RunInputs(arrays=make(run, pieces, lengths), rows=tuple(_adjacent(rows)))

    def _padded(
        self, run: Run, pieces: list[tuple[Int32Array, Int32Array]], lengths: list[int]
    ) -> dict[str, Int32Array]:
        ids = np.zeros((run.sequences, run.tokens), np.int32)
        places = np.full((run.sequences, run.tokens), -1, np.int32)
        for number, (tokens, row) in enumerate(pieces):
            ids[number, : len(tokens)] = tokens
            places[number, : len(row)] = row
        # Sequences that only fill the run up have one token: attention over none gives NaN.
        filled = np.ones(run.sequences, np.int32)
        filled[: len(lengths)] = lengths
        return {"input_ids": ids, "vision_row": places, "lengths": filled}

    def _packed(
        self, run: Run, pieces: list[tuple[Int32Array, Int32Array]], lengths: list[int]
    ) -> dict[str, Int32Array]:
        total = sum(lengths)
        ids, places = np.zeros(run.tokens, np.int32), np.full(run.tokens, -1, np.int32)
        ids[:total] = np.concatenate([tokens for tokens, _ in pieces])
        places[:total] = np.concatenate([row for _, row in pieces])
        positions = np.zeros(run.tokens, np.int32)
        positions[:total] = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        bounds = np.full(run.sequences + 1, total, np.int32)
        bounds[0] = 0
        np.cumsum(lengths, out=bounds[1 : len(lengths) + 1])
        return {
            "input_ids": ids,
            "vision_row": places,
            "positions": positions,
            "query_lengths": bounds,
            "key_value_lengths": bounds,
        }


def _adjacent(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges that follow one another."""
    found: list[tuple[int, int]] = []
    for start, end in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found
