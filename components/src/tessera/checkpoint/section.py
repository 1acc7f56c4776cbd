"""Typed look-ups in a checkpoint's JSON files; every complaint names the file and the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tessera.errors import CheckpointError
from tessera.small_files import MOST_JSON_BYTES, read_json

CONFIG_FILE: Final = "config.json"

# By the last word of a key, some times what published models have. Layers, and widths to cut vectors to, are
# listed before they are compared with the weights: a width of 10**9 took 4.5 GB.
_MOST: Final = {
    "layers": 1 << 10,
    "depth": 1 << 10,
    "heads": 1 << 12,
    "size": 1 << 17,
    "dim": 1 << 17,
    "dimension": 1 << 17,
    "dimensions": 1 << 17,
    "features": 1 << 17,
    "patch": 1 << 7,
    "tiles": 1 << 7,
}
_MOST_OF_KEY: Final = {
    "vocab_size": 1 << 24,
    "image_size": 1 << 14,
    "force_image_size": 1 << 14,
    "patch_size": 1 << 10,
    "merge_size": 1 << 6,
    "spatial_merge_size": 1 << 6,
}
_MOST_OTHERWISE: Final = 1 << 24
_MOST_NUMBER: Final = 1e30


def most_of(key: str) -> int:
    """Return the largest integer that a key may have."""
    return _MOST_OF_KEY.get(key, _MOST.get(key.rpartition("_")[2], _MOST_OTHERWISE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One JSON object, and where it was read from.

    A key whose value is ``null`` counts as absent, as it does for the reference implementation. The
    getters take a ``default`` for keys that may be absent; without one, absence is a ``CheckpointError``.
    """

    path: Path
    prefix: str = ""
    values: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path, *, optional: bool = False, most_bytes: int = MOST_JSON_BYTES) -> Section:
        """Read the JSON object in ``path``; an ``optional`` file that is not there reads as empty.

        Raises ``CheckpointError`` for one that is no regular file, or has more than ``most_bytes``.
        """
        try:
            parsed = read_json(path, most_bytes)
        except FileNotFoundError as error:
            if optional:
                return cls(path=path, values={})
            raise CheckpointError(f"{path}: there is no such file") from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: not readable as JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise CheckpointError(f"{path}: must hold a JSON object, not {type(parsed).__name__}")
        return cls(path=path, values=parsed)

    def error(self, key: str, complaint: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.prefix}{key} {complaint}", param=f"{self.prefix}{key}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def section(self, key: str) -> Section:
        """The object below ``key``, which must be there."""
        value = self._value(key, None, "an object", dict)
        return Section(path=self.path, prefix=f"{self.prefix}{key}.", values=value)

    def integer(self, key: str, default: int | None = None, *, at_least: int | None = 1) -> int:
        """Return an integer of at least ``at_least``, and at most what ``most_of`` the key says."""
        value: int = self._value(key, default, "an integer", int)
        self._check_most(key, value)
        if at_least is not None and value < at_least:
            raise self.error(key, f"must be at least {at_least}, not {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive, finite number."""
        value: float = self._value(key, default, "a number", int, float)
        if not 0 < value < _MOST_NUMBER:
            raise self.error(key, f"must be positive and finite, not {short(value)}")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value: bool = self._value(key, default, "true or false", bool)
        return value

    def truth(self, key: str, default: bool | None = None) -> bool:
        """Return what ``flag`` does, and take 0 and 1, too, as files have it whose readers ask for truth."""
        value: int = self._value(key, default, "true or false", bool, int)
        if value not in (0, 1):
            raise self.error(key, f"must be true or false, or 1 or 0, not {short(value)}")
        return bool(value)

    def string(self, key: str, default: str | None = None, *, among: Sequence[str] = ()) -> str:
        value: str = self._value(key, default, "a string", str)
        if among and value not in among:
            raise self.error(key, f"must be one of {list(among)}, not {value!r}")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers; absent means empty."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.error(key, f"must be a list of integers, not {short(value)}")
        for item in value:
            self._check_most(key, item)
        return tuple(value)

    def _check_most(self, key: str, value: int) -> None:
        most = most_of(key)
        if abs(value) > most:
            raise self.error(key, f"must be at most {most}, not {short(value)}")

    def _value(self, key: str, default: object, what: str, *kinds: type) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, f"is missing; it must be {what}")
        # Exactly: true is no number.
        if type(value) not in kinds:
            raise self.error(key, f"must be {what}, not {short(value)}")
        return value


def short(value: object) -> str:
    """Return how Python writes a value, for a message: its beginning, where that is long."""
    if isinstance(value, int) and abs(value) >= 10**100:
        return "a number of more than 100 digits"
    written = repr(value)
    return written if len(written) <= 1000 else f"{written[:1000]}..."
