"""The flavours of built engines by name; a flavour's own imports happen only when it is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from tessera.engine.compiled.manifest import Binding, Manifest
from tessera.engine.compiled.spec import BuildSpec
from tessera.errors import ConfigError
from tessera.models.base import Model

Progress = Callable[[str], None]
"""Told, in a few words, what is being done now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What a flavour reports of the files that it wrote; the rest of the manifest follows from the spec."""

    bindings: tuple[Binding, ...]
    capabilities: tuple[str, ...]
    versions: dict[str, str]
    notes: dict[str, str] = field(default_factory=dict)


class Flavour(Protocol):
    """A compiler of stages. Errors name what is not installed and how to install it."""

    def build(
        self, model: Model, spec: BuildSpec, directory: Path, *, timing_cache: Path | None, progress: Progress
    ) -> Built:
        """Write the engine's files into the empty ``directory``; raises ``EngineBuildFailed``."""
        ...

    def inspect(self, directory: Path, manifest: Manifest) -> dict[str, Any]:
        """What can be said of the built engine beyond its manifest, as JSON values.

        Raises ``EngineMismatch`` for files that are not what the manifest says.
        """
        ...


_FLAVOURS = {
    "tensorrt": "tessera.engine.tensorrt.build:TENSORRT",
    "tensorrt_rtx": "tessera.engine.tensorrt.build:TENSORRT_RTX",
    "aoti": "tessera.engine.aoti.build:AOTI",
}


def flavour(name: str) -> Flavour:
    """Raises ``ConfigError`` for an unknown flavour."""
    if name not in _FLAVOURS:
        raise ConfigError(f"flavour {name!r} is none of {', '.join(_FLAVOURS)}")
    module, _, attribute = _FLAVOURS[name].partition(":")
    return cast(Flavour, getattr(import_module(module), attribute))
