"""The options of a family, as ``Family.open_model`` gets them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Generic, Protocol, TypeVar

import msgspec

from tessera.checkpoint.declared import Task
from tessera.errors import ConfigError
from tessera.models.base import Model

T = TypeVar("T", bound=msgspec.Struct)
T_contra = TypeVar("T_contra", contravariant=True)

MaxTokens = Annotated[int, msgspec.Meta(ge=16)]
"""Bounds one input, or one pair."""


class Opened(Protocol[T_contra]):
    """The class of a family's models."""

    family: str

    def __call__(self, path: Path, options: T_contra, /) -> Model:
        """Read configuration and tokenizer; the weights are not looked at. Raises ``CheckpointError``."""
        ...


@dataclass(frozen=True, kw_only=True)
class OptionsFamily(Generic[T]):
    """Implements ``tessera.models.base.Family`` for a family whose options are one Struct.

    ``opened`` is the class of its models.
    """

    model_types: tuple[str, ...]
    options: type[T]
    opened: Opened[T]
    architectures: tuple[str, ...] = ()
    task: Task | None = None
    hub_models: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.opened.family

    def open_model(self, path: Path, options: Mapping[str, object]) -> Model:
        return self.opened(path, read_options(options, self.options, family=self.name))


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Those of a family that has none."""


def read_options(options: Mapping[str, object], kind: type[T], *, family: str) -> T:
    """The options as the family's Struct of them.

    Raises ``ConfigError`` naming an option that the family does not know, or one whose value is of another
    type or out of bounds.
    """
    known = kind.__struct_fields__
    for name in options:
        if name not in known:
            offered = f"its options are {', '.join(known)}" if known else "it has no options"
            raise ConfigError(f"model option {name!r} is unknown to {family}; {offered}")
    try:
        return msgspec.convert(dict(options), kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"model options of {family}: {error}") from error
