"""One frozen value for each component, built once in its ``main`` from flags and YAML.

Nothing below ``main`` reads flags, files or the environment. Unknown keys are errors that name the key
and the file.
"""

from __future__ import annotations

import json
import math
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import yaml

from tessera.engine.compiled.spec import BuildSpec
from tessera.engine.config import EngineConfig
from tessera.errors import ConfigError
from tessera.rpc.runtime import RpcConfig
from tessera.settings import convert


class Mode(StrEnum):
    """What a worker does: both stages, the vision stage, or the text stage."""

    AGG = "agg"
    ENCODE = "encode"
    EMBED = "embed"


class TransportConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``kind`` is auto or one transport; ``slab_mb`` bounds what an encode worker lends at a time.

    ``staging_mb`` is the reader's registered memory for NIXL, ``nixl_interfaces`` the network interfaces it
    listens on, separated by commas, empty for all; a lease lasts ``lease_seconds``. ``checksum`` makes
    producers say what the rows were and readers make sure of it.
    """

    kind: str = "auto"
    slab_mb: int = 256
    staging_mb: int = 64
    nixl_interfaces: str = "lo"
    lease_seconds: float = 10.0
    checksum: bool = False

    def __post_init__(self) -> None:
        if self.slab_mb < 1 or self.staging_mb < 1:
            raise ValueError("slab_mb and staging_mb must be at least 1")
        if not 0 < self.lease_seconds < math.inf:
            raise ValueError("lease_seconds must be positive")


class StageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file under ``engine_configs`` holds; each role reads the stages it runs.

    ``preprocess`` says where image files are decoded: in ``processes`` that may crash, or on ``threads`` of
    the worker; ``preprocess_threads`` is how many at a time. A process has ``preprocess_seconds`` and
    ``preprocess_mb`` MiB for an image.

    ``threads`` are the CPU threads of a batch, which it uses for its pieces side by side or all for each
    operation; 0 for torch's own choice. ``build`` lists what ``tessera-engine build`` makes; workers do not
    read it.
    """

    vision: EngineConfig = EngineConfig(max_batch_cost=8, max_queue_cost=512)
    text: EngineConfig = EngineConfig(max_batch_cost=8192, max_queue_cost=262_144)
    transport: TransportConfig = TransportConfig()
    preprocess: str = "processes"
    preprocess_threads: int = 2
    preprocess_seconds: float = 10.0
    preprocess_mb: int = 2048
    threads: int = 0
    build: tuple[BuildSpec, ...] = ()

    def __post_init__(self) -> None:
        if self.preprocess_threads < 1 or self.threads < 0:
            raise ValueError("preprocess_threads must be at least 1, and threads at least 0")
        if self.preprocess not in ("processes", "threads"):
            raise ValueError(f"preprocess {self.preprocess!r} is neither processes nor threads")
        if not 0 < self.preprocess_seconds < math.inf or self.preprocess_mb < 64:
            raise ValueError("preprocess_seconds must be positive and preprocess_mb at least 64")


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker process.

    ``encode_endpoint`` is where an embed worker finds encode workers. ``cache_bytes`` bounds the CPU cache of
    vision rows. ``images`` false makes an embed worker that serves text alone. ``traces`` names exporters.
    ``dynamo_model`` makes one that embeds a model of Dynamo's own as well, for a stock ``dynamo.frontend``.
    """

    model_path: Path
    served_model_name: str
    mode: Mode
    rpc: RpcConfig
    stages: StageConfig
    encode_endpoint: str
    images: bool = True
    cache_bytes: int = 1 << 30
    max_image_pixels: int = 100_000_000
    drain_seconds: float = 30.0
    encode_wait_seconds: float = 30.0
    dynamo_model: bool = False
    traces: tuple[str, ...] = ()


def load_stages(path: Path | None, override: str | None) -> StageConfig:
    """The YAML file's values, with the JSON object ``override`` merged over them key by key."""
    values: dict[str, Any] = {}
    source = "engine config"
    defaults = msgspec.to_builtins(StageConfig())
    if path is not None:
        source = str(path)
        try:
            parsed = yaml.safe_load(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{source}: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}: not valid YAML: {error}") from error
        values = _mapping({} if parsed is None else parsed, source)
    if override:
        try:
            changes = json.loads(override)
        except ValueError as error:
            raise ConfigError(f"--override-engine-args: not valid JSON: {error}") from error
        values = _merge(values, _mapping(changes, "--override-engine-args"))
        source += " with --override-engine-args"
    return convert(StageConfig, _merge(defaults, values), source)


def _mapping(value: object, source: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: must hold a mapping, not {type(value).__name__}")
    return value


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
