"""The options of a family, as ``Family.open_model`` gets them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from tessera.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)


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
