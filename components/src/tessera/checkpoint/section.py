"""Typed look-ups in a checkpoint's JSON files; every complaint names the file and the key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.errors import CheckpointError


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
    def read(cls, path: Path, *, optional: bool = False) -> Section:
        """Read the JSON object in ``path``; an ``optional`` file that is not there reads as empty."""
        try:
            parsed = json.loads(path.read_bytes())
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
        value: int = self._value(key, default, "an integer", int)
        if at_least is not None and value < at_least:
            raise self.error(key, f"must be at least {at_least}, not {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value: float = self._value(key, default, "a number", int, float)
        if not 0 < value < float("inf"):
            raise self.error(key, f"must be positive and finite, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value: bool = self._value(key, default, "true or false", bool)
        return value

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
            raise self.error(key, f"must be a list of integers, not {value!r}")
        return tuple(value)

    def _value(self, key: str, default: object, what: str, *kinds: type) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, f"is missing; it must be {what}")
        # Exactly: true is no number.
        if type(value) not in kinds:
            raise self.error(key, f"must be {what}, not {value!r}")
        return value
