"""From a checkpoint and a spec to an engine directory that is complete or not there."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

from tessera.atomic_directory import partial_directory
from tessera.engine.compiled.flavours import Progress, flavour
from tessera.engine.compiled.manifest import Manifest, describe_files
from tessera.engine.compiled.spec import BuildSpec
from tessera.models.base import Model


def build_engine(
    model: Model, spec: BuildSpec, out: Path, *, timing_cache: Path | None = None, progress: Progress
) -> Manifest:
    """Build into a directory beside ``out`` and rename it; raises ``ConfigError`` when ``out`` exists."""
    compiler = flavour(spec.flavour)
    started = time.monotonic()
    with partial_directory(out) as partial:
        built = compiler.build(model, spec, partial, timing_cache=timing_cache, progress=progress)
        progress("hashing the files")
        manifest = Manifest(
            stage=spec.stage,
            flavour=spec.flavour,
            layout=spec.layout,
            dtype=spec.dtype,
            family=model.family,
            fingerprint=model.fingerprint,
            hidden=model.hidden,
            capabilities=built.capabilities,
            versions=built.versions,
            profiles=spec.profiles,
            bindings=built.bindings,
            files=describe_files(partial),
            decomposable=spec.decomposable,
            build_seconds=round(time.monotonic() - started, 1),
            built_at=datetime.now(UTC).isoformat(timespec="seconds"),
            notes=built.notes,
        )
        manifest.write(partial)
    return manifest
