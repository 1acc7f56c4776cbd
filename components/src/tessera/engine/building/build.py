"""From a checkpoint and a spec to an engine directory that is complete or not there."""

from __future__ import annotations

import shutil
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from tessera.engine.building.flavours import Progress, flavour
from tessera.engine.building.manifest import Manifest, describe_files
from tessera.engine.building.spec import BuildSpec
from tessera.errors import ConfigError
from tessera.models.base import Model


def build_engine(
    model: Model, spec: BuildSpec, out: Path, *, timing_cache: Path | None = None, progress: Progress
) -> Manifest:
    """Build into a directory beside ``out`` and rename it; raises ``ConfigError`` when ``out`` exists."""
    if out.exists():
        raise ConfigError(f"{out} exists already; name another directory or remove it")
    compiler = flavour(spec.flavour)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    started = time.monotonic()
    try:
        partial.chmod(0o755)
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
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest
