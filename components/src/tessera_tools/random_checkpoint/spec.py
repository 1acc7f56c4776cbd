"""What a random checkpoint is made of, said by the family whose layout it has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tessera_tools.random_checkpoint.weights import RandomTensor


class Spec(Protocol):
    """What to write: the shapes of one family's checkpoint."""

    @property
    def shards(self) -> int: ...

    def files(self, dtype: str, seed: int) -> Mapping[str, dict[str, Any]]:
        """The JSON files by name."""
        ...

    def tensors(self, directory: Path) -> Iterable[RandomTensor]:
        """The tensors in the files' order; the JSON files are in ``directory`` already."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A family's checkpoints: ``tiny`` runs anywhere, ``full`` has the published model's shapes."""

    tiny: Spec
    full: Spec


def rope_json(key: str, theta: float, rope: Mapping[str, Any] | None) -> dict[str, Any]:
    """What ``config.json`` says of RoPE: below ``rope_scaling``, or ``rope_parameters`` as newer tools do."""
    if key == "rope_parameters":
        return {key: {"rope_theta": theta, "rope_type": "default", **(rope or {})}}
    return {"rope_theta": theta, "rope_scaling": None if rope is None else dict(rope)}
