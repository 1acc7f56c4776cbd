"""One shape envelope out of several profiles, for compilers that make one program for all sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tessera.engine.compiled.spec import Profile, Range

Envelope = Mapping[str, Range]
"""What each named axis may be, and the size to tune for."""


def envelope_of(profiles: Sequence[Profile]) -> Envelope:
    """From one to the largest size of any profile, tuned for the first one's; smaller sizes cost nothing."""
    return {
        axis: Range(
            1,
            max(1, getattr(profiles[0], axis).opt),
            max(getattr(profile, axis).max for profile in profiles),
        )
        for axis in ("tiles", "sequences", "tokens", "rows")
    }
