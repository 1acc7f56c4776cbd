"""The environment variables that the launch scripts and ``deploy/start-role`` read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, Self

_PACKAGE = Path(__file__).parents[1]
_WHOLE_NUMBER = re.compile(r"0|[1-9][0-9]*")


OPEN: Final = -1
"""A number of processes that is not given: it is chosen from the machine. No variable can hold it."""


class SettingError(Exception):
    """A variable that cannot be used, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What every process of a service is started with.

    Each field is the variable of its name in capitals; one that is empty has its default. A field's type says
    what its variable holds: ``int`` is a whole number, ``float`` a number.
    """

    model_path: str = str(_PACKAGE / "checkpoints" / "tessera-demo")
    model_options: str = ""
    served_model_name: str = ""
    dyn_http_host: str = "127.0.0.1"
    dyn_http_port: int = 8000
    dyn_namespace: str = "tessera"
    dyn_discovery_backend: str = "file"
    dyn_request_plane: str = "tcp"
    modality: str = "multimodal"
    allowed_local_media_path: str = ""
    max_file_size_mb: str = "50"
    log_format: str = "text"
    log_level: str = "info"
    frontend_args: str = ""
    engine_args: str = ""
    encode_endpoint: str = ""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Self:
        """Raises ``SettingError`` for what is no number."""
        found: dict[str, str | int | float] = {}
        for field in fields(cls):
            name = field.name.upper()
            if text := environment.get(name, ""):
                found[field.name] = _parse(name, text, str(field.type))
        return cls(**found)  # type: ignore[arg-type]

    def of_dynamo(self) -> dict[str, str]:
        """The variables that Dynamo's runtime reads, too, with the values that are used."""
        return {
            "DYN_NAMESPACE": self.dyn_namespace,
            "DYN_DISCOVERY_BACKEND": self.dyn_discovery_backend,
            "DYN_REQUEST_PLANE": self.dyn_request_plane,
        }

    @property
    def model_name(self) -> str:
        return self.served_model_name or os.path.basename(self.model_path.rstrip("/"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings(Shared):
    """What ``launch/agg.sh`` and ``launch/e_p.sh`` read."""

    # One for each card where they are not given (launch/split).
    agg_workers: int = OPEN
    encode_workers: int = OPEN
    embed_workers: int = OPEN
    # Lists of GPUs, one for each worker in turn: ENCODE_CUDA_VISIBLE_DEVICES=0,1
    agg_cuda_visible_devices: str = ""
    encode_cuda_visible_devices: str = ""
    embed_cuda_visible_devices: str = ""
    agg_engine_args: str = ""
    encode_engine_args: str = ""
    embed_engine_args: str = ""
    # All of them answer on DYN_HTTP_PORT; 0 for a host that has workers alone.
    frontends: int = OPEN
    # Each answers on a port of its own as well, from this one on; 0: none does.
    frontend_port_base: int = 0
    # Workers answer /health and /metrics on this port and the ones above it.
    dyn_system_port_base: int = 8081
    dyn_system_host: str = "127.0.0.1"
    # How many there are on all hosts; what this one starts where they are not given.
    expect_embed_workers: str = ""
    expect_encode_workers: str = ""
    ready_timeout_seconds: float = 600.0
    # Of the frontends, then of the workers, what has not drained by then is killed; above their own
    # --drain-seconds.
    stop_timeout_seconds: int = 60
    python: str = "python3"
    venv: str = ""
    # The page to try the service on, at /: on or off.
    frontend_page: str = "on"
    cuda_mps: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSettings(Shared):
    """What ``deploy/start-role`` reads: every process is on a host of its own, and reached from others."""

    model_path: str = ""
    dyn_http_host: str = "0.0.0.0"
    dyn_discovery_backend: str = "etcd"
    dyn_system_port: str = "9090"
    dyn_system_host: str = "0.0.0.0"
    dyn_tcp_rpc_host: str = ""
    dyn_tcp_response_stream_host: str = ""
    drain_seconds: str = "30"
    host_address: str = ""
    pod_ip: str = ""
    host_interface: str = ""
    # Of a task of a Slurm job: workers of one node share its address.
    dyn_system_port_base: int = 9090
    slurm_localid: int = 0
    slurmd_nodename: str = ""
    # Of workers that share what they see: those of this mode on the host, those of any mode on the card.
    workers_on_host: int = 1
    workers_on_card: int = 1
    # Of a cache of vision rows, where it is not to be chosen.
    cache_gb: str = ""
    python: str = "python3"


def _parse(name: str, text: str, kind: str) -> str | int | float:
    if kind == "int":
        if not _WHOLE_NUMBER.fullmatch(text):
            raise SettingError(f"{name}={text}: is not a whole number")
        return int(text)
    if kind == "float":
        try:
            return float(text)
        except ValueError:
            raise SettingError(f"{name}={text}: is not a number") from None
    return text


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table of variables. ``default`` is what it shows, where that is not the fields' own."""

    names: str
    text: str
    default: str | None = None


TABLE: Final = (
    Row(
        "MODEL_PATH, SERVED_MODEL_NAME",
        "the checkpoint directory and the name in requests",
        "the demonstration model",
    ),
    Row("MODEL_OPTIONS", "a JSON object with options of the model's family (`--model-options`)", "none"),
    Row(
        "AGG_WORKERS",
        "workers with both stages (`agg.sh`): one for each card, or entry of `AGG_CUDA_VISIBLE_DEVICES`; one "
        "without cards",
        "one a card",
    ),
    Row(
        "ENCODE_WORKERS, EMBED_WORKERS",
        "workers of each kind (`e_p.sh`): likewise, so that a card has one of each; no encode workers for a "
        "model of text alone",
        "one a card",
    ),
    Row(
        "AGG_, ENCODE_, EMBED_CUDA_VISIBLE_DEVICES",
        "lists such as `0,1`, one entry for each worker in turn",
        "all that `CUDA_VISIBLE_DEVICES` leaves",
    ),
    Row(
        "AGG_, ENCODE_, EMBED_ENGINE_ARGS",
        "YAML: engine, dtype, device, batch and queue sizes, transport; or a folder of such files",
        "`engine_configs`",
    ),
    Row(
        "FRONTENDS",
        "frontends, all on one port: three for eight cores beside cards, one without cards; any number of "
        "processes may be 0 on a host of several",
        "by cores",
    ),
    Row("DYN_HTTP_HOST, DYN_HTTP_PORT", "where the frontends listen"),
    Row(
        "FRONTEND_PORT_BASE",
        "first frontend's port of its own, the next ones above it, for a balancer that wants to see each",
        "none",
    ),
    Row(
        "DYN_SYSTEM_PORT_BASE",
        "first worker's `/health` and `/metrics`, the next ones above it; below 32768. A second service on "
        "one host needs its own",
    ),
    Row(
        "LOG_FORMAT, LOG_LEVEL",
        "`json` for one object a line; `docs/operations.md` explains the fields",
    ),
    Row("READY_TIMEOUT_SECONDS, STOP_TIMEOUT_SECONDS", "how long a script waits for its processes"),
    Row("PYTHON, VENV, PIP_ARGS", "how the environment is made", "python3, `.venv`, none"),
    Row("DYN_DISCOVERY_BACKEND, DYN_REQUEST_PLANE, DYN_NAMESPACE", "Dynamo's own"),
    Row("ALLOWED_LOCAL_MEDIA_PATH, MAX_FILE_SIZE_MB", "local image files, bytes of one image"),
    Row(
        "CUDA_MPS",
        "NVIDIA's MPS where several workers share a card: `auto`, `on`, `off`",
    ),
    Row("MODALITY", "`text` makes embed workers that never ask for images"),
    Row(
        "OTEL_TRACES_EXPORTER",
        "`otlp` exports traces of requests to `OTEL_EXPORTER_OTLP_ENDPOINT`; `docs/traces.md` shows two",
        "none",
    ),
    Row("FRONTEND_PAGE", "`off` leaves out the page at `/` (`--no-page`)"),
    Row(
        "FRONTEND_ARGS",
        "further flags of the frontend, all in `.venv/bin/python -m tessera.frontend --help`",
        "",
    ),
)
"""The table of variables in ``docs/settings.md``, and what ``--help`` prints."""


def _cells(row: Row) -> tuple[str, str, str]:
    """The three cells of a row, in Markdown."""
    names = row.names.split(", ")
    default = row.default
    if default is None:
        of = {field.name.upper(): str(field.default) for field in fields(LaunchSettings)}
        default = ", ".join(dict.fromkeys(_shown(of[name]) for name in names))
    return ", ".join(f"`{name}`" for name in names), default, row.text


def _shown(default: str) -> str:
    return default.removesuffix(".0") or "none"


def markdown_table() -> str:
    """The table of variables in Markdown."""
    lines = ["| variable | default | |", "|---|---|---|"]
    for row in TABLE:
        names, default, text = _cells(row)
        lines.append(f"| {names} | {default} | {text} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def table_help(*, without: str | None = None) -> str:
    """The same for a terminal, without the rows that only the other script (``without``) reads."""
    lines = []
    for row in TABLE:
        if without is not None and f"`{without}`" in row.text:
            continue
        names, default, text = (
            re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell.replace("`", "")) for cell in _cells(row)
        )
        lines.append(f"  {names} ({default})" if default else f"  {names}")
        lines.append(f"      {text}")
    return "\n".join(lines) + "\n"
