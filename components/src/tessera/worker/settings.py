"""A worker's settings: its command line, and the YAML file that this names. Flags have Dynamo's names.

The parts stand beside the code that they are for. The order of the fields is the order of ``--help``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec

from tessera.checkpoint.source import Source
from tessera.defaults import ENGINE_CONFIGS
from tessera.engine.kind import engine_config
from tessera.engine.settings import EngineSettings
from tessera.errors import ConfigError
from tessera.flags import check_flags, convert, mapping, parse_flags
from tessera.logs import LogSettings
from tessera.models import family_of, find
from tessera.rpc.runtime import RpcSettings
from tessera.settings import (
    CHOSEN,
    GIB,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    AccessLogShare,
    Modality,
    ModelOptions,
    ModelPath,
    Revision,
    ServedModelNames,
    Setting,
    Traces,
    exporters,
    served_names,
)
from tessera.small_files import read_yaml, why_unread
from tessera.transport.settings import TransportSettings


class Mode(StrEnum):
    """What a worker does: both stages, the vision stage, or the text stage."""

    AGG = "agg"
    ENCODE = "encode"
    EMBED = "embed"


class StageSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file below ``defaults.ENGINE_CONFIGS`` holds; each role reads the stages it runs."""

    vision: EngineSettings = EngineSettings(max_batch_cost=0, max_queue_cost=0)
    text: EngineSettings = EngineSettings(max_batch_cost=0, max_queue_cost=0)
    transport: TransportSettings = TransportSettings()
    preprocess: Annotated[
        str,
        Setting(
            help="where image files are decoded: in separate `processes`, which may crash, or on `threads`"
        ),
    ] = "processes"
    preprocess_threads: Annotated[int, Setting(help=f"images that are decoded at a time; {CHOSEN}")] = 0
    preprocess_seconds: Annotated[float, Setting(help="processor time that a process has for one image")] = (
        10.0
    )
    preprocess_mb: Annotated[int, Setting(help="MiB that a process may use for one image")] = 2048
    model_options: Annotated[
        dict[str, Any],
        Setting(
            help="options of the model's family; `--model-options` overrides them, key by key. Frontends "
            "read only `--model-options`"
        ),
    ] = {}
    threads: Annotated[
        int,
        Setting(help=f"CPU threads of a batch, for its pieces side by side or for each operation; {CHOSEN}"),
    ] = 0
    build: Annotated[
        tuple[dict[str, Any], ...],
        Setting(help="engines that `tessera engine build` makes; no worker reads it"),
    ] = ()

    def __post_init__(self) -> None:
        if self.preprocess_threads < 0 or self.threads < 0:
            raise ValueError("preprocess_threads and threads must be at least 0")
        if self.preprocess not in ("processes", "threads"):
            raise ValueError(f"preprocess {self.preprocess!r} is neither processes nor threads")
        if not 0 < self.preprocess_seconds < math.inf or self.preprocess_mb < 64:
            raise ValueError("preprocess_seconds must be positive and preprocess_mb at least 64")


_PIXELS_AND_DRAIN = "--max-image-pixels must be positive and --drain-seconds not negative"


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process."""

    model_path: ModelPath
    revision: Revision = ""
    model_options: ModelOptions = {}
    served_model_names: ServedModelNames = ()
    mode: Annotated[
        Mode,
        Setting(flag="--disaggregation-mode", help="the stages that the worker runs: both, vision or text"),
    ] = Mode.AGG
    modality: Annotated[
        Modality,
        Setting(flag="--modality", help="text makes an embed worker that never asks for vision rows"),
    ] = "multimodal"
    encode_endpoint: Annotated[
        str,
        Setting(flag="--encode-endpoint", help="dyn://namespace.component.endpoint of the encode workers"),
    ] = ""
    cache_bytes: Annotated[
        int | None,
        Setting(
            flag="--multimodal-embedding-cache-capacity-gb",
            unit=GIB,
            check=replace(NOT_NEGATIVE, text="{flag} must be a number that is not negative"),
            help="CPU cache of vision rows, GiB; 0 turns it off; by default a share of the host's memory",
        ),
    ] = None
    host_workers: Annotated[
        int,
        Setting(
            flag="--workers-on-host",
            check=POSITIVE,
            help="workers of this mode on this host, which share its cores and its memory",
        ),
    ] = 1
    card_workers: Annotated[
        int,
        Setting(
            flag="--workers-on-card",
            check=POSITIVE,
            help="workers of any mode on this worker's GPU, which share its memory",
        ),
    ] = 1
    host_share: Annotated[
        float,
        Setting(
            flag="--host-share",
            check=SHARE,
            help="part of the host's memory that is for this worker, up to 1; 0: as much as for each of the "
            "others",
        ),
    ] = 0.0
    card_share: Annotated[
        float,
        Setting(
            flag="--card-share",
            check=SHARE,
            help="part of the GPU's memory that is for this worker, up to 1; 0: as much as for each of the "
            "others",
        ),
    ] = 0.0
    extra_engine_args: Annotated[
        Path | None,
        Setting(
            flag="--extra-engine-args",
            help="YAML file, a folder of such, or the name of a file that comes with Tessera, such as "
            "llama_nemotron_vl/agg_h100.yaml",
            more="In a folder it is `<family>/<mode>.yaml`, or `default/<mode>.yaml` where there is none",
        ),
    ] = None
    override_engine_args: Annotated[
        dict[str, Any],
        Setting(
            flag="--override-engine-args", metavar="JSON", help="a JSON object merged over the YAML file"
        ),
    ] = {}
    max_image_pixels: Annotated[
        int,
        Setting(
            flag="--max-image-pixels",
            check=replace(POSITIVE, text=_PIXELS_AND_DRAIN),
            help="pixels of one image",
        ),
    ] = 100_000_000
    drain_seconds: Annotated[
        float,
        Setting(
            flag="--drain-seconds",
            check=replace(NOT_NEGATIVE, text=_PIXELS_AND_DRAIN),
            help="how long a process waits for requests in progress after SIGTERM",
        ),
    ] = 30.0
    encode_wait_seconds: Annotated[
        float,
        Setting(
            flag="--encode-wait-seconds",
            check=replace(NOT_NEGATIVE, text="{flag} must not be negative"),
            help="how long images wait for a new encode worker after the last one has gone",
        ),
    ] = 30.0
    dynamo_model: Annotated[
        bool,
        Setting(
            flag="--dynamo-model",
            help="serve text and data URLs to an unmodified dynamo.frontend as well; it asks for no API keys",
        ),
    ] = False
    want_traces: Traces = None
    rpc: Annotated[RpcSettings, Setting(group="Dynamo")] = RpcSettings()
    log: Annotated[LogSettings, Setting(group="log")] = LogSettings()
    access_log_share: AccessLogShare = 1.0
    stages: StageSettings = StageSettings()
    """What the YAML file and the changes to it say."""
    traces: tuple[str, ...] = ()
    """The exporters of traces, by name."""
    source: Source | None = None
    """What ``model_path``, a directory then, holds."""

    @property
    def images(self) -> bool:
        """Whether an embed worker asks for vision rows."""
        return self.modality == "multimodal"


def parse(argv: Sequence[str] | None = None, *, source: str | None = None) -> WorkerSettings:
    """``source`` is what the launcher says of the model (``checkpoint/source``).

    Downloads a model of a hub. Raises ``ConfigError`` for values that argparse cannot judge and
    ``CheckpointError`` for what is no model; exits with status 2 for the rest.
    """
    given = parse_flags(
        WorkerSettings, argv, prog="python -m tessera.worker", description="One Tessera worker."
    )
    if given.dynamo_model and given.mode is Mode.ENCODE:
        raise ConfigError("--dynamo-model is for workers that embed")
    found = find(str(given.model_path), given.revision, known=Source.of_json(source))
    given = msgspec.structs.replace(given, model_path=found.directory, source=found)
    file = given.extra_engine_args
    if file is not None and file.is_dir():
        file = _of_family(file, given)
        given = msgspec.structs.replace(given, extra_engine_args=file)
    stages = load_stages(file, given.override_engine_args)
    return msgspec.structs.replace(
        given,
        model_options=stages.model_options | given.model_options,
        served_model_names=served_names(given.served_model_names, found.name),
        encode_endpoint=given.encode_endpoint or f"dyn://{given.rpc.namespace}.encode.generate",
        stages=stages,
        traces=exporters(given.want_traces),
    )


def check_stages(words: Sequence[str]) -> None:
    """Raise ``ConfigError`` for engine settings that a worker with these flags would refuse."""
    given = check_flags(WorkerSettings, words)
    file = given.extra_engine_args
    if file is not None and file.is_dir():
        if not given.model_path.is_dir():
            # Of which family it is will be known once it has been downloaded.
            return
        file = _of_family(file, given)
    load_stages(file, given.override_engine_args)


def _of_family(folder: Path, given: WorkerSettings) -> Path:
    """The folder's file for the checkpoint's family; raises ``CheckpointError`` where that has none."""
    family = family_of(given.model_path, given.model_options)
    own = folder / family.name / f"{given.mode.value}.yaml"
    return own if own.is_file() else folder / "default" / own.name


def load_stages(path: Path | None, override: dict[str, Any] | None = None) -> StageSettings:
    """The YAML file's values, with those of ``override`` merged over them key by key.

    A path that is not there may be the name of a file that comes with Tessera.
    """
    values: dict[str, Any] = {}
    source = "engine config"
    defaults = msgspec.to_builtins(StageSettings())
    if path is not None:
        if not path.exists():
            path = ENGINE_CONFIGS / path if (ENGINE_CONFIGS / path).is_file() else engine_config(path) or path
        source = str(path)
        try:
            parsed = read_yaml(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{source}: {why_unread(error)}") from error
        values = mapping({} if parsed is None else parsed, source)
    if override:
        values = _merge(values, override)
        source += " with --override-engine-args"
    return convert(StageSettings, _merge(defaults, values), source)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
