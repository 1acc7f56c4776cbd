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
        value = self._value(key, None, "an object")
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, not {value!r}")
        return Section(path=self.path, prefix=f"{self.prefix}{key}.", values=value)

    def integer(self, key: str, default: int | None = None, *, at_least: int | None = 1) -> int:
        value = self._value(key, default, "an integer")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"must be an integer, not {value!r}")
        if at_least is not None and value < at_least:
            raise self.error(key, f"must be at least {at_least}, not {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self._value(key, default, "a number")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"must be a number, not {value!r}")
        if not 0 < value < float("inf"):
            raise self.error(key, f"must be positive and finite, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r}")
        return value

    def string(self, key: str, default: str | None = None, *, among: Sequence[str] = ()) -> str:
        value = self._value(key, default, "a string")
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, not {value!r}")
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

    def _value(self, key: str, default: object, kind: str) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise self.error(key, f"is missing; it must be {kind}")
        return default
