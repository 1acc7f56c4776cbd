"""How a batch is cut into runs that some profile of the engine takes; on the host, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from tessera.engine.compiled.manifest import Manifest
from tessera.engine.compiled.spec import Layout, Profile
from tessera.errors import EngineFailed, EngineMismatch

# What sequences are rounded up to a multiple of.
_LEAST_TOKENS = 16
# What a run of its own is taken to cost, in tokens of padding that it saves; an estimate, not measured.
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
        """Runs for sequences of these lengths with so many vision rows each.

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
        # The cheapest way to join neighbouring classes, found from the shortest one on.
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
        """Every size up to the coarse limit that a profile takes, with lengths that are rounded up to it."""
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


def check_text_profiles(manifest: Manifest, max_tokens: int, where: str) -> None:
    """Raises ``EngineMismatch`` unless the longest input goes through alone, vision rows and nothing else."""
    if not any(min(profile.tokens.max, profile.rows.max) >= max_tokens for profile in manifest.profiles):
        found = "; ".join(f"tokens {profile.tokens}, rows {profile.rows}" for profile in manifest.profiles)
        raise EngineMismatch(
            f"{where}: the checkpoint takes inputs of {max_tokens} tokens, all of which may be vision rows,"
            f" but no profile does; they are {found}"
        )


def check_vision_profiles(manifest: Manifest, where: str) -> int:
    """The most tiles of one run; raises ``EngineMismatch`` when a smaller number is in no profile."""
    most = max(profile.tiles.max for profile in manifest.profiles)
    for count in range(1, most + 1):
        if not any(count in profile.tiles for profile in manifest.profiles):
            raise EngineMismatch(
                f"{where}: no profile takes {count} tiles, but one takes {most}; the profiles are"
                f" {', '.join(str(profile.tiles) for profile in manifest.profiles)}"
            )
    return most
