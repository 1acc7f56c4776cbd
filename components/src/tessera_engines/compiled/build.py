"""Builds an engine directory from a checkpoint and a spec: it is complete, or it is not there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from tessera.atomic_directory import atomic_directory
from tessera.errors import ConfigError
from tessera.models.base import Model
from tessera_engines.compiled.manifest import Binding, Manifest, file_entries
from tessera_engines.compiled.spec import BuildSpec

Progress = Callable[[str], None]
"""Called with a few words on the step that begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What a flavour reports of the files that it wrote; the spec gives the rest of the manifest."""

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
        """Describe the built engine beyond its manifest, as JSON values.

        Raises ``EngineMismatch`` for files that are not what the manifest says.
        """
        ...


_FLAVOURS = {
    "tensorrt": "tessera_engines.tensorrt.build:TENSORRT",
    "tensorrt_rtx": "tessera_engines.tensorrt.build:TENSORRT_RTX",
    "aoti": "tessera_engines.aoti.build:AOTI",
}


def flavour(name: str) -> Flavour:
    """The compiler of that name, imported when it is asked for; raises ``ConfigError`` for an unknown one."""
    if name not in _FLAVOURS:
        raise ConfigError(f"flavour {name!r} is none of {', '.join(_FLAVOURS)}")
    module, _, attribute = _FLAVOURS[name].partition(":")
    return cast(Flavour, getattr(import_module(module), attribute))


def build_engine(
    model: Model, spec: BuildSpec, out: Path, *, timing_cache: Path | None = None, progress: Progress
) -> Manifest:
    """Build into a directory beside ``out`` and rename it; raises ``ConfigError`` when ``out`` exists."""
    compiler = flavour(spec.flavour)
    started = time.monotonic()
    with atomic_directory(out) as partial:
        built = compiler.build(model, spec, partial, timing_cache=timing_cache, progress=progress)
        progress("hashing the files")
        manifest = Manifest(
            stage=spec.stage,
            flavour=spec.flavour,
            layout=spec.layout,
            dtype=spec.dtype,
            **Manifest.of_model(model),
            capabilities=built.capabilities,
            versions=built.versions,
            profiles=spec.profiles,
            bindings=built.bindings,
            files=file_entries(partial),
            decomposable=spec.decomposable,
            build_seconds=round(time.monotonic() - started, 1),
            built_at=datetime.now(UTC).isoformat(timespec="seconds"),
            notes=built.notes,
        )
        manifest.write(partial)
    return manifest
