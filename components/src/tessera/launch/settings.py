"""What a service is started with: one table of variables, flags of ``tessera serve`` and keys of its YAML.

The standard library alone: the launch scripts read it before anything is installed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Annotated, Any, Final, Self, get_args, get_origin, get_type_hints

from tessera.defaults import MODEL

_WHOLE_NUMBER = re.compile(r"0|[1-9][0-9]*")


_NOT_READ: Final = frozenset({"passed", "written"})

OPEN: Final = -1
"""A number of processes that is not given: it is chosen from the machine. Nobody can write it."""


class SettingError(Exception):
    """A setting that cannot be used, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """What is known of a setting beside its type and its default. The variable is its name in capitals.

    ``flag`` is that of ``tessera serve``, and without its dashes the key of a YAML file; the launch scripts
    alone read what has none. ``group`` is a heading of ``--help``, ``default`` what stands there where it is
    not the field's own. It is one of ``choices`` where there are such. Only services of one ``shape``, agg or
    e_p, have it where that is given. With ``of_model`` each of several models may have its own.
    """

    help: str
    flag: str = ""
    metavar: str = ""
    group: str = ""
    default: str | None = None
    shape: str = ""
    choices: tuple[str, ...] = ()
    of_model: bool = False


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was written, and how somebody would find it: ``--frontends two``."""

    text: str
    said: str


_CARDS: Final = "cards, one for each worker in turn, such as 0,1"
_ENGINES: Final = "engine settings: a YAML file, a folder of such, or the name of one that comes with Tessera"
_A_KIND: Final = "workers of each kind: likewise, so that a card has one of each"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What every process of a service is started with.

    A variable that is empty has its default. ``int`` is a whole number, ``float`` a number.
    """

    model_path: Annotated[
        str,
        Variable(
            of_model=True,
            flag="--model-path",
            metavar="MODEL",
            group="model",
            help="a checkpoint directory, or ORG/NAME or ORG/NAME@REVISION of a hub, downloaded once; in the "
            "variable commas separate several",
            default="the demonstration model",
        ),
    ] = str(MODEL)
    model_revision: Annotated[
        str,
        Variable(
            of_model=True,
            flag="--revision",
            group="model",
            help="the branch, tag or commit of a hub's model; `main` by default",
        ),
    ] = ""
    served_model_name: Annotated[
        str,
        Variable(
            of_model=True,
            flag="--served-model-name",
            metavar="NAME",
            group="model",
            help="its name in requests, or several, separated by spaces or commas; answers say the first",
            default="ORG/NAME, or as the directory ends",
        ),
    ] = ""
    model_options: Annotated[
        str,
        Variable(
            of_model=True,
            flag="--model-options",
            metavar="JSON",
            group="model",
            help="an object with options of the model's family",
        ),
    ] = ""
    dimensions_allowed: Annotated[
        str,
        Variable(
            of_model=True,
            flag="--dimensions-allowed",
            metavar="WIDTHS",
            group="model",
            help="widths of vectors that requests may ask for beside those that the checkpoint lists, such "
            "as 256,512,1024 or 64-2048",
        ),
    ] = ""
    modality: Annotated[
        str,
        Variable(
            of_model=True,
            flag="--modality",
            choices=("multimodal", "text"),
            group="model",
            help="`text` makes embed workers that never ask for images",
        ),
    ] = "multimodal"
    dyn_http_host: Annotated[
        str, Variable(flag="--host", group="addresses", help="where the frontends listen")
    ] = "127.0.0.1"
    dyn_http_port: Annotated[
        int, Variable(flag="--port", group="addresses", help="where the frontends listen")
    ] = 8000
    tls_cert: Annotated[
        str,
        Variable(
            flag="--tls-cert",
            metavar="FILE",
            group="addresses",
            help="the frontends answer by TLS with this certificate: PEM, with the chain behind it",
        ),
    ] = ""
    tls_key: Annotated[
        str,
        Variable(
            flag="--tls-key",
            metavar="FILE",
            group="addresses",
            help="its private key; TESSERA_TLS_KEY_PASSWORD holds the password of an encrypted one",
            default="in the file of the certificate",
        ),
    ] = ""
    dyn_namespace: Annotated[
        str,
        Variable(
            of_model=True,
            flag="--namespace",
            group="Dynamo",
            help="processes of one namespace find each other",
        ),
    ] = "tessera"
    dyn_discovery_backend: Annotated[
        str,
        Variable(
            flag="--discovery-backend",
            choices=("file", "etcd", "kubernetes", "mem"),
            group="Dynamo",
            help="where instances are listed",
        ),
    ] = "file"
    dyn_request_plane: Annotated[
        str,
        Variable(
            flag="--request-plane",
            choices=("tcp", "nats"),
            group="Dynamo",
            help="how processes call each other",
        ),
    ] = "tcp"
    allowed_local_media_path: Annotated[
        str,
        Variable(
            flag="--allowed-local-media-path",
            metavar="FOLDER",
            group="images",
            help="image files below it may be named in requests",
        ),
    ] = ""
    max_file_size_mb: Annotated[
        str, Variable(flag="--max-file-size-mb", group="images", help="MiB of one image")
    ] = "50"
    log_format: Annotated[
        str,
        Variable(
            flag="--log-format",
            choices=("text", "json"),
            group="log",
            help="lines for people, or `json`: one object a line",
        ),
    ] = "text"
    log_level: Annotated[
        str,
        Variable(
            flag="--log-level",
            choices=("debug", "info", "warning", "error"),
            group="log",
            help="of what is logged, and above",
        ),
    ] = "info"
    frontend_args: Annotated[
        str,
        Variable(help="further flags of the frontend, as `tessera serve` takes them itself"),
    ] = ""
    engine_args: Annotated[
        str,
        Variable(
            of_model=True,
            flag="--engine-args",
            metavar="FILE",
            group="engines and cards",
            help=_ENGINES,
            default="by family and mode",
        ),
    ] = ""
    encode_endpoint: Annotated[
        str,
        Variable(
            of_model=True,
            flag="--encode-endpoint",
            metavar="ENDPOINT",
            group="several hosts",
            help="dyn://namespace.component.endpoint of the encode workers",
            default="this service's",
            shape="e_p",
        ),
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
        found: dict[str, Any] = {}
        written: dict[str, str] = {}
        for name, kind, variable in _declared(cls):
            default = cls.__dataclass_fields__[name].default
            if given is not None and name in given:
                value = given[name]
            elif text := environment.get(name.upper(), ""):
                value = Given(text, f"{name.upper()}={text}")
            else:
                flag = variable.flag if variable is not None and given is not None else ""
                written[name] = f"{flag} {default}" if flag else f"{name.upper()}={default}"
                continue
            if variable is not None and variable.choices and value.text not in variable.choices:
                raise SettingError(f"{value.said}: is none of {', '.join(variable.choices)}")
            found[name], written[name] = _parse(value, kind), value.said
        return cls(**found, written=written)

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
        Variable(
            of_model=True,
            flag="--agg-workers",
            group="processes",
            help="workers with both stages: one for each card, or entry of AGG_CUDA_VISIBLE_DEVICES; one "
            "without cards",
            default="one a card",
            shape="agg",
        ),
    ] = OPEN
    encode_workers: Annotated[
        int,
        Variable(
            of_model=True,
            flag="--encode-workers",
            group="processes",
            help=f"{_A_KIND}; no encode workers for a model of text alone",
            default="one a card",
            shape="e_p",
        ),
    ] = OPEN
    embed_workers: Annotated[
        int,
        Variable(
            of_model=True,
            flag="--embed-workers",
            group="processes",
            help=f"{_A_KIND}; no encode workers for a model of text alone",
            default="one a card",
            shape="e_p",
        ),
    ] = OPEN
    frontends: Annotated[
        int,
        Variable(
            flag="--frontends",
            group="processes",
            help="frontends, all on one port: three for eight cores beside cards, one without cards. Any "
            "number of processes may be 0 on a host of several",
            default="by cores",
        ),
    ] = OPEN
    agg_engine_args: Annotated[
        str,
        Variable(
            of_model=True,
            flag="--agg-engine-args",
            metavar="FILE",
            group="engines and cards",
            help="the same for the workers of one mode",
            default="`--engine-args`",
            shape="agg",
        ),
    ] = ""
    encode_engine_args: Annotated[
        str,
        Variable(
            of_model=True,
            flag="--encode-engine-args",
            metavar="FILE",
            group="engines and cards",
            help="the same for the workers of one mode",
            default="`--engine-args`",
            shape="e_p",
        ),
    ] = ""
    embed_engine_args: Annotated[
        str,
        Variable(
            of_model=True,
            flag="--embed-engine-args",
            metavar="FILE",
            group="engines and cards",
            help="the same for the workers of one mode",
            default="`--engine-args`",
            shape="e_p",
        ),
    ] = ""
    agg_cuda_visible_devices: Annotated[
        str,
        Variable(
            of_model=True,
            flag="--agg-cuda-visible-devices",
            metavar="CARDS",
            group="engines and cards",
            help=_CARDS,
            default="all that CUDA_VISIBLE_DEVICES leaves",
            shape="agg",
        ),
    ] = ""
    encode_cuda_visible_devices: Annotated[
        str,
        Variable(
            of_model=True,
            flag="--encode-cuda-visible-devices",
            metavar="CARDS",
            group="engines and cards",
            help=_CARDS,
            default="all that CUDA_VISIBLE_DEVICES leaves",
            shape="e_p",
        ),
    ] = ""
    embed_cuda_visible_devices: Annotated[
        str,
        Variable(
            of_model=True,
            flag="--embed-cuda-visible-devices",
            metavar="CARDS",
            group="engines and cards",
            help=_CARDS,
            default="all that CUDA_VISIBLE_DEVICES leaves",
            shape="e_p",
        ),
    ] = ""
    cuda_mps: Annotated[
        str,
        Variable(
            flag="--cuda-mps",
            choices=("auto", "on", "off"),
            group="engines and cards",
            help="NVIDIA's MPS, which `auto` starts where several workers share a card",
        ),
    ] = "auto"
    frontend_port_base: Annotated[
        int,
        Variable(
            flag="--frontend-port-base",
            group="addresses",
            help="first frontend's port of its own, the next ones above it, for a balancer that wants to see "
            "each",
            default="none",
        ),
    ] = 0
    dyn_system_host: Annotated[
        str,
        Variable(flag="--system-host", group="addresses", help="of the workers' `/health` and `/metrics`"),
    ] = "127.0.0.1"
    dyn_system_port_base: Annotated[
        int,
        Variable(
            flag="--system-port-base",
            group="addresses",
            help="first worker's port, the next ones above it; below 32768. A second service on one host "
            "needs its own",
        ),
    ] = 8081
    expect_embed_workers: Annotated[
        str,
        Variable(
            of_model=True,
            flag="--expect-embed-workers",
            group="several hosts",
            help="workers of all hosts, so that a missing one shows",
            default="those of this host",
        ),
    ] = ""
    expect_encode_workers: Annotated[
        str,
        Variable(
            of_model=True,
            flag="--expect-encode-workers",
            group="several hosts",
            help="workers of all hosts, so that a missing one shows",
            default="those of this host",
            shape="e_p",
        ),
    ] = ""
    ready_timeout_seconds: Annotated[
        float,
        Variable(
            flag="--ready-timeout-seconds",
            metavar="SECONDS",
            group="processes",
            help="that the service has until it is ready",
        ),
    ] = 600.0
    stop_timeout_seconds: Annotated[
        int,
        Variable(
            flag="--stop-timeout-seconds",
            metavar="SECONDS",
            group="processes",
            help="that frontends, then workers, have to end, above their own --drain-seconds; then they are "
            "killed",
        ),
    ] = 60
    frontend_page: Annotated[
        str,
        Variable(
            flag="--frontend-page",
            choices=("on", "off"),
            group="processes",
            help="the page to try the service on, at /",
        ),
    ] = "on"
    python: Annotated[
        str, Variable(help="the interpreter that the launch scripts make an environment with")
    ] = "python3"
    venv: Annotated[str, Variable(help="the environment that the launch scripts make", default="`.venv`")] = (
        ""
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSettings(Shared):
    """What ``deploy/start-role`` reads: every process is on a host of its own, and reached from others."""

    model_path: str = ""
    # Several: the file that frontends read. A worker serves the one of them that SERVED_MODEL_NAME names.
    models_file: str = ""
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


def _declared(settings: type[Shared]) -> Iterator[tuple[str, type, Variable | None]]:
    """Name, type and what is known of each setting, in their order."""
    hints = get_type_hints(settings, include_extras=True)
    for name in (each.name for each in fields(settings) if each.name not in _NOT_READ):
        kind, *extras = get_args(hints[name]) if get_origin(hints[name]) is Annotated else [hints[name]]
        yield name, kind, next((each for each in extras if isinstance(each, Variable)), None)


def _parse(given: Given, kind: type) -> str | int | float:
    if kind is int:
        if not _WHOLE_NUMBER.fullmatch(given.text):
            raise SettingError(f"{given.said}: is not a whole number")
        return int(given.text)
    if kind is float:
        try:
            return float(given.text)
        except ValueError:
            raise SettingError(f"{given.said}: is not a number") from None
    return given.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of ``LaunchSettings`` as tables and ``--help`` show it."""

    field: str
    kind: type
    variable: Variable
    default: str

    @property
    def name(self) -> str:
        """Of the variable."""
        return self.field.upper()

    @property
    def text(self) -> str:
        """What it means, and what it may be."""
        choices = ", ".join(f"`{choice}`" for choice in self.variable.choices)
        return f"{self.variable.help} ({choices})" if choices else self.variable.help


_GROUPS: Final = (
    "model",
    "processes",
    "engines and cards",
    "addresses",
    "images",
    "log",
    "several hosts",
    "Dynamo",
)


def settings(*, shape: str | None = None) -> list[Setting]:
    """Those of ``LaunchSettings``, group by group; with a ``shape`` those that its services have."""
    found = []
    for name, kind, variable in _declared(LaunchSettings):
        if variable is None or (shape and variable.shape not in ("", shape)):
            continue
        own = LaunchSettings.__dataclass_fields__[name].default
        default = variable.default if variable.default is not None else str(own).removesuffix(".0") or "none"
        found.append(Setting(field=name, kind=kind, variable=variable, default=default))
    groups = (*_GROUPS, "")
    return sorted(found, key=lambda each: groups.index(each.variable.group))


_OTHERS: Final = (
    Setting(
        field="pip_args",
        kind=str,
        variable=Variable(help="further flags of pip, where the launch scripts make an environment"),
        default="none",
    ),
    Setting(
        field="otel_traces_exporter",
        kind=str,
        variable=Variable(
            help="`otlp` exports traces of requests to `OTEL_EXPORTER_OTLP_ENDPOINT`; "
            "`docs/traces.md` shows two"
        ),
        default="none",
    ),
)
"""Variables that are read elsewhere."""


def _rows(found: list[Setting]) -> Iterator[tuple[list[Setting], str]]:
    """Settings and their defaults; neighbours that mean the same share a row."""
    for _, alike in groupby(found, key=lambda each: each.text):
        row = list(alike)
        yield row, ", ".join(dict.fromkeys(each.default for each in row))


def markdown_table() -> str:
    """The table of settings in Markdown."""
    lines = ["| flag of `tessera serve` | variable | default | |", "|---|---|---|---|"]
    for row, default in _rows([*settings(), *_OTHERS]):
        flags = ", ".join(f"`{each.variable.flag}`" for each in row if each.variable.flag)
        names = ", ".join(f"`{each.name}`" for each in row)
        lines.append(f"| {flags} | {names} | {default} | {row[0].text} |".replace("|  |", "| |"))
    keys = [each.variable.flag.removeprefix("--") for each in settings() if each.variable.of_model]
    named = ", ".join(f"`{key.replace('-', '_')}`" for key in keys if key != "model-path")
    lines += [
        "",
        f"An entry of `models:` in the YAML has `model`, and of these what it needs of its own: {named}.",
    ]
    return "\n".join(lines) + "\n"


def variables_help(shape: str) -> str:
    """The variables of a launch script for a terminal."""
    lines = []
    for row, default in _rows([*settings(shape=shape), *_OTHERS]):
        lines.append(f"  {', '.join(each.name for each in row)} ({plain(default)})")
        lines.append(f"      {plain(row[0].text)}")
    return "\n".join(lines) + "\n"


def plain(text: str) -> str:
    """Markdown without its marks of code."""
    return text.replace("`", "")
