"""What a service is started with: variables, flags of ``tessera serve`` and keys of its YAML.

The standard library alone: the launch scripts read it before anything is installed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, Literal, Self

from tessera.defaults import MODEL
from tessera.settings import (
    DiscoveryBackend,
    Field,
    LogLevel,
    Modality,
    Namespace,
    RequestPlane,
    Row,
    Setting,
    fields_of,
    joined,
)

_WHOLE_NUMBER = re.compile(r"0|[1-9][0-9]*")

_NOT_READ: Final = frozenset({"passed", "written"})

OPEN: Final = -1
"""A number of processes that is not given: it is chosen from the machine. Nobody can write it."""


class SettingError(Exception):
    """A setting that cannot be used, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """What settings of the launcher have beside a ``Setting``. The variable is the field's name in capitals.

    The flag is that of ``tessera serve``, and without its dashes the key of a YAML file; the launch scripts
    alone read what has none. ``group`` is a heading of ``--help``, ``default`` what stands there where it is
    not the field's own. Only services of one ``shape``, agg or e_p, have it where that is given. With
    ``of_model`` each of several models may have its own.
    """

    group: str = ""
    default: str | None = None
    shape: str = ""
    of_model: bool = False


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was written, and how somebody would find it: ``--frontends two``."""

    text: str
    said: str


_MODEL: Final = Variable(group="model", of_model=True)
_PROCESSES: Final = Variable(group="processes")
_ADDRESSES: Final = Variable(group="addresses")
_IMAGES: Final = Variable(group="images")
_LOG: Final = Variable(group="log")
_DYNAMO: Final = Variable(group="Dynamo")
_ENGINES: Final = Variable(group="engines and GPUs", of_model=True)
_HOSTS: Final = Variable(group="several hosts", of_model=True)

# What each kind of worker has.
_WORKERS: Final = Setting(
    help="workers of each kind: by default one of each on each GPU, or one of each without a GPU; no encode "
    "workers for a model of text alone"
)
_ONE_A_CARD: Final = replace(_PROCESSES, default="one per GPU", shape="e_p", of_model=True)
_MODE_ARGS: Final = Setting(metavar="FILE", help="the same for the workers of one mode")
_AS_ENGINE_ARGS: Final = replace(_ENGINES, default="`--engine-args`", shape="e_p")
_CARDS: Final = Setting(metavar="GPUS", help="GPUs, one for each worker in turn, such as 0,1")
_ALL_CARDS: Final = replace(_ENGINES, default="all that CUDA_VISIBLE_DEVICES leaves", shape="e_p")
_EXPECTED: Final = Setting(help="workers of all hosts, so that a missing one shows")
_OF_THIS_HOST: Final = replace(_HOSTS, default="those of this host")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What every process of a service is started with.

    A variable that is empty has its default. ``int`` is a whole number, ``float`` a number.
    """

    model_path: Annotated[
        str,
        Setting(
            flag="--model-path",
            metavar="MODEL",
            help="a checkpoint directory, or ORG/NAME or ORG/NAME@REVISION of a hub, downloaded once; in the "
            "variable commas separate several",
        ),
        replace(_MODEL, default="the demonstration model"),
    ] = str(MODEL)
    model_revision: Annotated[
        str,
        Setting(flag="--revision", help="the branch, tag or commit of a hub's model; `main` by default"),
        _MODEL,
    ] = ""
    served_model_name: Annotated[
        str,
        Setting(
            flag="--served-model-name",
            metavar="NAME",
            help="the name in requests, or several, separated by spaces or commas; answers have the first",
        ),
        replace(_MODEL, default="ORG/NAME, or the directory's name"),
    ] = ""
    model_options: Annotated[
        str,
        Setting(flag="--model-options", metavar="JSON", help="an object with options of the model's family"),
        _MODEL,
    ] = ""
    dimensions_allowed: Annotated[
        str,
        Setting(
            flag="--dimensions-allowed",
            metavar="WIDTHS",
            help="widths of vectors that requests may ask for beside those that the checkpoint lists, such "
            "as 256,512,1024 or 64-2048",
        ),
        _MODEL,
    ] = ""
    modality: Annotated[
        Modality,
        Setting(flag="--modality", help="`text` makes embed workers that never ask for images"),
        _MODEL,
    ] = "multimodal"
    dyn_http_host: Annotated[str, Setting(flag="--host", help="where the frontends listen"), _ADDRESSES] = (
        "127.0.0.1"
    )
    dyn_http_port: Annotated[int, Setting(flag="--port", help="where the frontends listen"), _ADDRESSES] = (
        8000
    )
    tls_cert: Annotated[
        str,
        Setting(
            flag="--tls-cert",
            metavar="FILE",
            help="the frontends answer by TLS with this certificate: PEM, with the chain behind it",
        ),
        _ADDRESSES,
    ] = ""
    tls_key: Annotated[
        str,
        Setting(
            flag="--tls-key",
            metavar="FILE",
            help="its private key; TESSERA_TLS_KEY_PASSWORD holds the password of an encrypted one",
        ),
        replace(_ADDRESSES, default="in the file of the certificate"),
    ] = ""
    dyn_namespace: Annotated[Namespace, replace(_DYNAMO, of_model=True)] = "tessera"
    dyn_discovery_backend: Annotated[DiscoveryBackend, _DYNAMO] = "file"
    dyn_request_plane: Annotated[RequestPlane, _DYNAMO] = "tcp"
    allowed_local_media_path: Annotated[
        str,
        Setting(
            flag="--allowed-local-media-path",
            metavar="FOLDER",
            help="image files below it may be named in requests",
        ),
        _IMAGES,
    ] = ""
    max_file_size_mb: Annotated[str, Setting(flag="--max-file-size-mb", help="MiB of one image"), _IMAGES] = (
        "50"
    )
    log_format: Annotated[
        Literal["text", "json"],
        Setting(flag="--log-format", help="lines for people, or `json`: one object a line"),
        _LOG,
    ] = "text"
    log_level: Annotated[LogLevel, _LOG] = "info"
    frontend_args: Annotated[
        str, Setting(help="further flags of the frontend, as `tessera serve` takes them itself")
    ] = ""
    engine_args: Annotated[
        str,
        Setting(
            flag="--engine-args",
            metavar="FILE",
            help="engine settings: a YAML file, a folder of them, or the name of one that comes with Tessera",
        ),
        replace(_ENGINES, default="by family and mode"),
    ] = ""
    encode_endpoint: Annotated[
        str,
        Setting(
            flag="--encode-endpoint",
            metavar="ENDPOINT",
            help="dyn://namespace.component.endpoint of the encode workers",
        ),
        replace(_HOSTS, default="this service's", shape="e_p"),
    ] = ""
    passed: tuple[str, ...] = ()
    """Flags of the frontends that were given themselves."""
    written: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """How each setting is named to whoever gave it, by its field."""

    @classmethod
    def read(cls, environment: Mapping[str, str], given: Mapping[str, Given] | None = None) -> Self:
        """The settings of the environment, with those over them that are ``given`` by field.

        What has its default is called by its flag where something may be given, else by its variable. Raises
        ``SettingError`` for what is no number.
        """
        values: dict[str, Any] = {}
        written: dict[str, str] = {}
        for setting in _read_fields(cls):
            name, variable = setting.name, setting.name.upper()
            if given is not None and name in given:
                value = given[name]
            elif text := environment.get(variable, ""):
                value = Given(text, f"{variable}={text}")
            else:
                flag = setting.setting.flag if given is not None else ""
                written[name] = f"{flag} {setting.default}" if flag else f"{variable}={setting.default}"
                continue
            values[name], written[name] = _parse(value, setting), value.said
        return cls(**values, written=written)

    def named(self, name: str) -> str:
        """A setting and its value as they were written: ``--port 8000``, or ``DYN_HTTP_PORT=8000``."""
        return self.written.get(name) or f"{name.upper()}={getattr(self, name)}"

    def of_dynamo(self) -> dict[str, str]:
        """The variables that Dynamo's runtime reads, too, with the values that are used."""
        return {
            "DYN_NAMESPACE": self.dyn_namespace,
            "DYN_DISCOVERY_BACKEND": self.dyn_discovery_backend,
            "DYN_REQUEST_PLANE": self.dyn_request_plane,
        }

    @property
    def frontend_flags(self) -> list[str]:
        """Further flags of the frontends."""
        return [*self.frontend_args.split(), *self.passed]

    @property
    def scheme(self) -> str:
        """Of the frontends' URLs."""
        given = self.tls_cert or any(flag.startswith("--tls-cert") for flag in self.frontend_flags)
        return "https" if given else "http"

    @property
    def door_ports(self) -> dict[str, str]:
        """Return the ports of doors that frontends are given, as they were written, by their flags."""
        flags = self.frontend_flags
        if not flags:
            return {}
        # Here: it takes 20 ms to find out which doors there are.
        from tessera.frontend.door import doors

        known = {flag for door in doors() for flag in door.ports}
        ports: dict[str, str] = {}
        for index, word in enumerate(flags):
            flag, equals, value = word.partition("=")
            if flag in known:
                ports.setdefault(flag, value if equals else "".join(flags[index + 1 : index + 2]))
        return ports

    @property
    def model_names(self) -> list[str]:
        """All names that requests may use."""
        given = list(dict.fromkeys(filter(None, re.split(r"[\s,]+", self.served_model_name))))
        if given:
            return given
        if not os.path.isdir(self.model_path) and self.hub_model is not None:
            return [self.hub_model]
        return [os.path.basename(self.model_path.rstrip("/"))]

    @property
    def model_name(self) -> str:
        """The one that answers say."""
        return self.model_names[0]

    @property
    def hub_model(self) -> str | None:
        """The ORG/NAME that ``model_path`` has the form of, if it does; raises ``SettingError``."""
        # Here: what a directory needs no part of takes 10 ms.
        from tessera.checkpoint.source import HubModel
        from tessera.errors import ConfigError

        try:
            named = HubModel.named(self.model_path, self.model_revision)
        except ConfigError as error:
            raise SettingError(f"{self.named('model_path')}: {error}") from error
        return None if named is None else named.repository


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings(Shared):
    """What ``tessera serve``, ``launch/agg.sh`` and ``launch/e_p.sh`` read."""

    agg_workers: Annotated[
        int,
        Setting(
            flag="--agg-workers",
            help="workers with both stages: one for each GPU, or for each entry of AGG_CUDA_VISIBLE_DEVICES; "
            "one without a GPU",
        ),
        replace(_ONE_A_CARD, shape="agg"),
    ] = OPEN
    encode_workers: Annotated[int, replace(_WORKERS, flag="--encode-workers"), _ONE_A_CARD] = OPEN
    embed_workers: Annotated[int, replace(_WORKERS, flag="--embed-workers"), _ONE_A_CARD] = OPEN
    frontends: Annotated[
        int,
        Setting(
            flag="--frontends",
            help="frontends, all on one port. Default: 3 for every 8 cores with GPUs, else 1. May be 0 if "
            "other hosts run them",
        ),
        replace(_PROCESSES, default="by cores"),
    ] = OPEN
    agg_engine_args: Annotated[
        str, replace(_MODE_ARGS, flag="--agg-engine-args"), replace(_AS_ENGINE_ARGS, shape="agg")
    ] = ""
    encode_engine_args: Annotated[str, replace(_MODE_ARGS, flag="--encode-engine-args"), _AS_ENGINE_ARGS] = ""
    embed_engine_args: Annotated[str, replace(_MODE_ARGS, flag="--embed-engine-args"), _AS_ENGINE_ARGS] = ""
    agg_cuda_visible_devices: Annotated[
        str, replace(_CARDS, flag="--agg-cuda-visible-devices"), replace(_ALL_CARDS, shape="agg")
    ] = ""
    encode_cuda_visible_devices: Annotated[
        str, replace(_CARDS, flag="--encode-cuda-visible-devices"), _ALL_CARDS
    ] = ""
    embed_cuda_visible_devices: Annotated[
        str, replace(_CARDS, flag="--embed-cuda-visible-devices"), _ALL_CARDS
    ] = ""
    cuda_mps: Annotated[
        Literal["auto", "on", "off"],
        Setting(
            flag="--cuda-mps", help="NVIDIA's MPS, which `auto` starts where several workers share a GPU"
        ),
        replace(_ENGINES, of_model=False),
    ] = "auto"
    frontend_port_base: Annotated[
        int,
        Setting(
            flag="--frontend-port-base",
            help="first frontend's port of its own, the next ones above it, for a balancer that wants to see "
            "each",
        ),
        replace(_ADDRESSES, default="none"),
    ] = 0
    dyn_system_host: Annotated[
        str,
        Setting(flag="--system-host", help="the address of the workers' `/health` and `/metrics`"),
        _ADDRESSES,
    ] = "127.0.0.1"
    dyn_system_port_base: Annotated[
        int,
        Setting(
            flag="--system-port-base",
            help="first worker's port, the next ones above it; below 32768. A second service on one host "
            "needs its own",
        ),
        _ADDRESSES,
    ] = 8081
    expect_embed_workers: Annotated[str, replace(_EXPECTED, flag="--expect-embed-workers"), _OF_THIS_HOST] = (
        ""
    )
    expect_encode_workers: Annotated[
        str, replace(_EXPECTED, flag="--expect-encode-workers"), replace(_OF_THIS_HOST, shape="e_p")
    ] = ""
    ready_timeout_seconds: Annotated[
        float,
        Setting(
            flag="--ready-timeout-seconds",
            metavar="SECONDS",
            help="time until the service has to be ready",
        ),
        _PROCESSES,
    ] = 600.0
    stop_timeout_seconds: Annotated[
        int,
        Setting(
            flag="--stop-timeout-seconds",
            metavar="SECONDS",
            help="time that frontends, then workers, have to end; then they are killed. Longer than their "
            "--drain-seconds",
        ),
        _PROCESSES,
    ] = 60
    frontend_page: Annotated[
        Literal["on", "off"],
        Setting(flag="--frontend-page", help="the web page at / to try the service on"),
        _PROCESSES,
    ] = "on"
    python: Annotated[
        str, Setting(help="the interpreter that the launch scripts make an environment with")
    ] = "python3"
    venv: Annotated[
        str, Setting(help="the environment that the launch scripts make"), Variable(default="`.venv`")
    ] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSettings(Shared):
    """What ``deploy/start-role`` reads: every process is on a host of its own, and reached from others."""

    model_path: str = ""
    # Several: the file that frontends read. A worker serves the one of them that SERVED_MODEL_NAME names.
    models_file: str = ""
    dyn_http_host: str = "0.0.0.0"
    dyn_discovery_backend: DiscoveryBackend = "etcd"
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


def _read_fields(settings: type[Shared]) -> list[Field]:
    return [field for field in fields_of(settings) if field.name not in _NOT_READ]


def _parse(given: Given, field: Field) -> str | int | float:
    if field.choices and given.text not in field.choices:
        raise SettingError(f"{given.said}: is none of {', '.join(field.choices)}")
    if field.kind is int:
        if not _WHOLE_NUMBER.fullmatch(given.text):
            raise SettingError(f"{given.said}: is not a whole number")
        return int(given.text)
    if field.kind is float:
        try:
            return float(given.text)
        except ValueError:
            raise SettingError(f"{given.said}: is not a number") from None
    return given.text


_GROUPS: Final = (
    *("model", "processes", "engines and GPUs", "addresses", "images", "log", "several hosts", "Dynamo"),
    "",
)


def variable_of(field: Field) -> Variable:
    """What is known of a setting of the launcher beside its ``Setting``."""
    return next((note for note in field.notes if isinstance(note, Variable)), Variable())


def settings(*, shape: str | None = None) -> list[Field]:
    """Those of ``LaunchSettings``, group by group; with a ``shape`` those that its services have."""
    fields = _read_fields(LaunchSettings)
    if shape:
        fields = [field for field in fields if variable_of(field).shape in ("", shape)]
    return sorted(fields, key=lambda field: _GROUPS.index(variable_of(field).group))


_ELSEWHERE: Final = (
    Field(
        name="pip_args",
        kind=str,
        setting=Setting(help="further flags of pip, where the launch scripts make an environment"),
        default="",
    ),
    Field(
        name="otel_traces_exporter",
        kind=str,
        setting=Setting(
            help="`otlp` exports traces of requests to `OTEL_EXPORTER_OTLP_ENDPOINT`; "
            "`docs/traces.md` shows two"
        ),
        default="",
    ),
)
"""Variables that are read elsewhere."""


def default_of(field: Field) -> str:
    """What tables and ``--help`` show as the default."""
    own = variable_of(field).default
    return own if own is not None else str(field.default).removesuffix(".0") or "none"


def rows(*, shape: str | None = None) -> list[Row]:
    """Rows of variables for a table; ``names`` are their fields'."""
    return joined(
        Row(names=(field.name,), defaults=(default_of(field),), text=field.text)
        for field in (*settings(shape=shape), *_ELSEWHERE)
    )


def variables_help(shape: str) -> str:
    """The variables of a launch script for a terminal."""
    lines = []
    for row in rows(shape=shape):
        defaults = ", ".join(dict.fromkeys(row.defaults))
        lines.append(f"  {', '.join(row.names).upper()} ({plain(defaults)})")
        lines.append(f"      {plain(row.text)}")
    return "\n".join(lines) + "\n"


def plain(text: str) -> str:
    """Markdown without its marks of code."""
    return text.replace("`", "")
