"""What a service is started with: variables, flags of ``tessera serve`` and keys of its YAML.

The standard library alone: the launch scripts read it before anything is installed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from tessera.defaults import MODEL
from tessera.settings import (
    PORT,
    POSITIVE,
    PREFIX,
    DiscoveryBackend,
    Field,
    LogLevel,
    Modality,
    Namespace,
    RequestPlane,
    Row,
    Setting,
    fields_of,
    is_link,
    joined,
)

N = TypeVar("N", int, float)

_WHOLE_NUMBER = re.compile(r"0|[1-9][0-9]*")

_NOT_READ: Final = frozenset({"passed", "written", "defaults"})

OPEN: Final = -1
"""A number of processes that is not given: it is chosen from the machine. Nobody can write it."""


class SettingError(Exception):
    """A setting that cannot be used, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable(Setting):
    """A setting of the launcher.

    The field's name in capitals is the variable of before, or with ``others`` one of somebody else's, such
    as Dynamo's, that is read as well.

    The flag is that of ``tessera serve``, and without its dashes the key of a YAML file; the launch scripts
    alone read what is in no ``group``, which is a heading of ``--help``. Unless it is given, it is the
    field's name without Dynamo's prefix. ``default`` is what ``--help`` shows where that is not the field's
    own. Only services of one ``shape``, agg or e_p, have it where that is given. With ``of_model`` each of
    several models may have its own.
    """

    group: str = ""
    default: str | None = None
    shape: str = ""
    of_model: bool = False
    others: bool = False


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was written, and how somebody would find it: ``--frontends two``."""

    text: str
    said: str


_MODEL: Final = partial(Variable, group="model", of_model=True)
_PROCESSES: Final = partial(Variable, group="processes")
_ADDRESSES: Final = partial(Variable, group="addresses")
_IMAGES: Final = partial(Variable, group="images")
_LOG: Final = partial(Variable, group="log")
_DYNAMO: Final = partial(Variable, group="Dynamo", others=True)
_OTHERS: Final = partial(Variable, others=True)
_ENGINES: Final = partial(Variable, group="engines and GPUs", of_model=True)
_HOSTS: Final = partial(Variable, group="several hosts", of_model=True)

# What each kind of worker has, of services with both kinds.
_WORKERS: Final = _PROCESSES(
    default="one per GPU",
    shape="e_p",
    of_model=True,
    help="workers of each kind: by default one of each on each GPU, or one of each without a GPU; no encode "
    "workers for a model of text alone",
)
_MODE_ARGS: Final = _ENGINES(
    metavar="FILE",
    default="`--engine-args`",
    shape="e_p",
    help="the same for the workers of one mode",
)
_CARDS: Final = _ENGINES(
    metavar="GPUS",
    default="all that CUDA_VISIBLE_DEVICES leaves",
    shape="e_p",
    help="GPUs, one for each worker in turn, such as 0,1",
)
_EXPECTED: Final = _HOSTS(
    default="those of this host", help="workers of all hosts, so that a missing one shows"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What every process of a service is started with.

    A variable that is empty has its default. ``int`` is a whole number, ``float`` a number.
    """

    model_path: Annotated[
        str,
        _MODEL(
            metavar="MODEL",
            default="the demonstration model",
            help="a checkpoint directory, or ORG/NAME or ORG/NAME@REVISION of a hub, downloaded once; in the "
            "variable commas separate several",
        ),
    ] = str(MODEL)
    model_revision: Annotated[
        str, _MODEL(flag="--revision", help="the branch, tag or commit of a hub's model; `main` by default")
    ] = ""
    served_model_name: Annotated[
        str,
        _MODEL(
            metavar="NAME",
            default="ORG/NAME, or the directory's name",
            help="the name in requests, or several, separated by spaces or commas; answers have the first",
        ),
    ] = ""
    model_options: Annotated[
        str, _MODEL(metavar="JSON", help="an object with options of the model's family")
    ] = ""
    model_task: Annotated[
        Literal["auto", "embed", "score", "sparse"],
        _MODEL(
            flag="--task",
            help="`auto` is what the checkpoint declares; `embed`, `score` and `sparse` take a language "
            "model whose files do not declare it for an embedder, a reranker or SPLADE, as the model option "
            "`task` does",
        ),
    ] = "auto"
    dimensions_allowed: Annotated[
        str,
        _MODEL(
            metavar="WIDTHS",
            help="widths of vectors that requests may ask for beside those that the checkpoint lists, such "
            "as 256,512,1024 or 64-2048",
        ),
    ] = ""
    max_embed_tokens: Annotated[
        int,
        _MODEL(
            help="tokens of a text that is longer than the model reads: it is cut into runs, and the mean of "
            "their vectors is its own; 0: it is refused",
        ),
    ] = 0
    modality: Annotated[Modality, _MODEL(help="`text` makes embed workers that never ask for images")] = (
        "multimodal"
    )
    dyn_http_host: Annotated[str, _ADDRESSES(help="where the frontends listen")] = "127.0.0.1"
    dyn_http_port: Annotated[int, _ADDRESSES(check=PORT, help="where the frontends listen")] = 8000
    tls_cert: Annotated[
        str,
        _ADDRESSES(
            metavar="FILE",
            help="the frontends answer by TLS with this certificate: PEM, with the chain behind it",
        ),
    ] = ""
    tls_key: Annotated[
        str,
        _ADDRESSES(
            metavar="FILE",
            default="in the file of the certificate",
            help="its private key; TESSERA_TLS_KEY_PASSWORD holds the password of an encrypted one",
        ),
    ] = ""
    dyn_namespace: Annotated[Namespace, _DYNAMO(of_model=True)] = "tessera"
    dyn_discovery_backend: Annotated[DiscoveryBackend, _DYNAMO()] = "file"
    dyn_request_plane: Annotated[RequestPlane, _DYNAMO()] = "tcp"
    allowed_local_media_path: Annotated[
        str, _IMAGES(metavar="FOLDER", help="image files below it may be named in requests")
    ] = ""
    max_file_size_mb: Annotated[str, _IMAGES(help="MiB of one image")] = "50"
    log_format: Annotated[
        Literal["text", "json"], _LOG(help="lines for people, or `json`: one object a line")
    ] = "text"
    log_level: Annotated[LogLevel, _LOG()] = "info"
    frontend_args: Annotated[
        str, Setting(help="further flags of the frontend, as `tessera serve` takes them itself")
    ] = ""
    engine_args: Annotated[
        str,
        _ENGINES(
            metavar="FILE",
            default="by family and mode",
            help="engine settings: a YAML file, a folder of them, or the name of one that comes with Tessera",
        ),
    ] = ""
    encode_endpoint: Annotated[
        str,
        _HOSTS(
            metavar="ENDPOINT",
            default="this service's",
            shape="e_p",
            help="dyn://namespace.component.endpoint of the encode workers",
        ),
    ] = ""
    passed: tuple[str, ...] = ()
    """Flags of the frontends that were given themselves."""
    written: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """How each setting is named to whoever gave it, by its field."""
    defaults: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    """The fields that nobody gave."""

    @classmethod
    def read(cls, environment: Mapping[str, str], given: Mapping[str, Given] | None = None) -> Self:
        """The settings of the environment, with those over them that are ``given`` by field.

        What has its default is called by its flag where something may be given, else by its variable. Raises
        ``SettingError`` for what is no number.
        """
        values: dict[str, Any] = {}
        written: dict[str, str] = {}
        for setting in read_fields(cls):
            name = setting.name
            if given is not None and name in given:
                value = given[name]
            elif found := _in_environment(environment, setting):
                value = found
            else:
                flag = setting.setting.flag if given is not None else ""
                default = setting.default
                written[name] = f"{flag} {default}" if flag else f"{setting.variable}={default}"
                continue
            values[name], written[name] = _parse(value, setting), value.said
        defaults = frozenset(written.keys() - values.keys())
        if (task := values.get("model_task", "auto")) != "auto":
            values["model_options"] = _with_option(values.get("model_options", ""), "task", task)
        return cls(**values, written=written, defaults=defaults)

    def named(self, name: str) -> str:
        """A setting and its value as they were written: ``--port 8000``, or ``TESSERA_PORT=8000``."""
        return self.written.get(name) or f"{PREFIX}{name.upper()}={getattr(self, name)}"

    def other(self, name: str) -> str:
        """What to end an error with about a setting that has its default: how to choose another."""
        if name not in self.defaults:
            return ""
        return f"; name another with {self.written[name].replace('=', ' ').partition(' ')[0]}"

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

    def check_path(self) -> None:
        """Raise ``SettingError`` for what is no directory, nor called as a model of a hub is."""
        path = self.model_path
        if not os.path.isdir(path) and (self.hub_model is None or os.path.isfile(path)):
            from tessera.checkpoint.unread import no_directory

            raise SettingError(f"{self.named('model_path')}: {no_directory(path)}")

    @property
    def is_adapter(self) -> bool:
        """Whether ``model_path`` is a directory with an adapter, and without the weights that it changes."""
        if not os.path.exists(os.path.join(self.model_path, "adapter_config.json")):
            return False
        from pathlib import Path

        from tessera.checkpoint.source import is_adapter

        return is_adapter(Path(self.model_path))

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
        replace(
            _WORKERS,
            shape="agg",
            default="by GPUs and cores",
            help="workers with both stages: one for each GPU, or for each entry of "
            "TESSERA_AGG_CUDA_VISIBLE_DEVICES; one without a GPU. With neither set, a model that is served "
            "alone, and of which an input passes at most 500 million parameters, has one for every 8 cores "
            "and every 6 GiB of a GPU, 4 on a GPU at most",
        ),
    ] = OPEN
    encode_workers: Annotated[int, _WORKERS] = OPEN
    embed_workers: Annotated[int, _WORKERS] = OPEN
    frontends: Annotated[
        int,
        _PROCESSES(
            default="by cores",
            help="frontends, all on one port. Default: 3 for every 8 cores with GPUs, else 1. May be 0 if "
            "other hosts run them",
        ),
    ] = OPEN
    agg_engine_args: Annotated[str, replace(_MODE_ARGS, shape="agg")] = ""
    encode_engine_args: Annotated[str, _MODE_ARGS] = ""
    embed_engine_args: Annotated[str, _MODE_ARGS] = ""
    agg_cuda_visible_devices: Annotated[str, replace(_CARDS, shape="agg")] = ""
    encode_cuda_visible_devices: Annotated[str, _CARDS] = ""
    embed_cuda_visible_devices: Annotated[str, _CARDS] = ""
    cuda_mps: Annotated[
        Literal["auto", "on", "off"],
        _ENGINES(of_model=False, help="NVIDIA's MPS, which `auto` starts where several workers share a GPU"),
    ] = "auto"
    frontend_port_base: Annotated[
        int,
        _ADDRESSES(
            check=PORT,
            default="none",
            help="first frontend's port of its own, the next ones above it, for a balancer that wants to see "
            "each",
        ),
    ] = 0
    dyn_system_host: Annotated[
        str, _ADDRESSES(others=True, help="the address of the workers' `/health` and `/metrics`")
    ] = "127.0.0.1"
    dyn_system_port_base: Annotated[
        int,
        _ADDRESSES(
            default="8081, or the next that are free",
            help="first worker's port, the next ones above it; below 32768",
        ),
    ] = 8081
    expect_embed_workers: Annotated[str, _EXPECTED] = ""
    expect_encode_workers: Annotated[str, replace(_EXPECTED, shape="e_p")] = ""
    ready_timeout_seconds: Annotated[
        float,
        _PROCESSES(check=POSITIVE, metavar="SECONDS", help="time until the service has to be ready"),
    ] = 600.0
    stop_timeout_seconds: Annotated[
        int,
        _PROCESSES(
            metavar="SECONDS",
            help="time that frontends, then workers, have to end; then they are killed. Longer than their "
            "--drain-seconds",
        ),
    ] = 60
    frontend_page: Annotated[
        Literal["on", "off"], _PROCESSES(help="the web page at / to try the service on")
    ] = "on"
    python: Annotated[
        str, Setting(help="the interpreter that the launch scripts make an environment with")
    ] = "python3"
    venv: Annotated[str, Variable(default="`.venv`", help="the environment that the launch scripts make")] = (
        ""
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSettings(Shared):
    """What ``deploy/start-role`` reads: every process is on a host of its own, and reached from others."""

    model_path: str = ""
    # Several: the file that frontends read. A worker serves the one of them that SERVED_MODEL_NAME names.
    models_file: str = ""
    dyn_http_host: Annotated[str, Setting(flag="--host")] = "0.0.0.0"
    dyn_discovery_backend: Annotated[DiscoveryBackend, _DYNAMO()] = "etcd"
    dyn_system_port: Annotated[str, _OTHERS(flag="--system-port")] = "9090"
    dyn_system_host: Annotated[str, _OTHERS(flag="--system-host")] = "0.0.0.0"
    dyn_tcp_rpc_host: Annotated[str, _OTHERS(flag="--tcp-rpc-host")] = ""
    dyn_tcp_response_stream_host: Annotated[str, _OTHERS(flag="--tcp-response-stream-host")] = ""
    drain_seconds: str = "30"
    host_address: str = ""
    pod_ip: Annotated[str, _OTHERS()] = ""
    host_interface: str = ""
    nixl_interfaces: str = ""
    # Of a task of a Slurm job: workers of one node share its address.
    dyn_system_port_base: Annotated[int, Setting(flag="--system-port-base")] = 9090
    slurm_localid: Annotated[int, _OTHERS()] = 0
    slurmd_nodename: Annotated[str, _OTHERS()] = ""
    # Of workers that share what they see: those of this mode on the host, those of any mode on the card.
    workers_on_host: int = 1
    workers_on_card: int = 1
    # Of a cache of vision rows, where it is not to be chosen.
    cache_gb: str = ""
    python: str = "python3"


def read_fields(settings: type[Shared]) -> list[Field]:
    """The settings that are read from variables, with their flags."""
    return [_flagged(field) for field in fields_of(settings) if field.name not in _NOT_READ]


def _flagged(field: Field) -> Field:
    if field.setting.flag or not variable_of(field).group:
        return field
    words = field.name.removeprefix("dyn_http_").removeprefix("dyn_").replace("_", "-")
    return replace(field, setting=replace(field.setting, flag=f"--{words}"))


def log_format_of(environment: Mapping[str, str]) -> str:
    """How lines are written, before anything else is known."""
    (setting,) = (field for field in read_fields(LaunchSettings) if field.name == "log_format")
    found = _in_environment(environment, setting)
    return found.text if found else ""


def _with_option(options: str, name: str, value: str) -> str:
    """Return an object in JSON with one more key; what is no object comes back as it is, to be refused."""
    try:
        parsed = json.loads(options or "{}")
    except (ValueError, RecursionError):
        return options
    return json.dumps({**parsed, name: value}) if isinstance(parsed, dict) else options


def _in_environment(environment: Mapping[str, str], field: Field) -> Given | None:
    """What a variable says, or the one of before, or somebody else's."""
    # Kubernetes has such a variable for each service of a name that it is alike.
    for name in (field.variable, field.name.upper()):
        if (text := environment.get(name, "")) and not is_link(name, text):
            return Given(text, f"{name}={text}")
    return None


def _parse(given: Given, field: Field) -> str | int | float:
    if field.choices and given.text not in field.choices:
        raise SettingError(f"{given.said}: is none of {', '.join(field.choices)}")
    if field.kind is int:
        if not _WHOLE_NUMBER.fullmatch(given.text):
            raise SettingError(f"{given.said}: is not a whole number")
        return _checked(int(given.text), given, field)
    if field.kind is float:
        try:
            return _checked(float(given.text), given, field)
        except ValueError:
            raise SettingError(f"{given.said}: is not a number") from None
    return given.text


def _checked(value: N, given: Given, field: Field) -> N:
    check = field.setting.check
    if check is not None and (refusal := check("", value)) is not None:
        raise SettingError(f"{given.said}: {refusal.strip()}")
    return value


_GROUPS: Final = (
    *("model", "processes", "engines and GPUs", "addresses", "images", "log", "several hosts", "Dynamo"),
    "",
)


def variable_of(field: Field) -> Variable:
    """What is known of a setting of the launcher beside its ``Setting``."""
    return next((note for note in field.notes if isinstance(note, Variable)), Variable())


def settings(*, shape: str | None = None) -> list[Field]:
    """Those of ``LaunchSettings``, group by group; with a ``shape`` those that its services have."""
    fields = read_fields(LaunchSettings)
    if shape:
        fields = [field for field in fields if variable_of(field).shape in ("", shape)]
    return sorted(fields, key=lambda field: _GROUPS.index(variable_of(field).group))


_ELSEWHERE: Final = {
    "pip_args": "further flags of pip, where the launch scripts make an environment",
    "otel_traces_exporter": "`otlp` exports traces of requests to `OTEL_EXPORTER_OTLP_ENDPOINT`; "
    "`docs/traces.md` shows two",
}
"""Variables that are read elsewhere, with what they mean; none has a default."""


def _elsewhere(name: str) -> str:
    return name.upper() if name.startswith("otel_") else f"{PREFIX}{name.upper()}"


def default_of(field: Field) -> str:
    """What tables and ``--help`` show as the default."""
    own = variable_of(field).default
    return own if own is not None else str(field.default).removesuffix(".0") or "none"


def rows(*, shape: str | None = None) -> list[Row]:
    """Rows of variables for a table."""
    own = [(field.variable, default_of(field), field.text) for field in settings(shape=shape)]
    elsewhere = [(_elsewhere(name), "none", text) for name, text in _ELSEWHERE.items()]
    return joined(
        Row(names=(name,), defaults=(default,), text=text) for name, default, text in own + elsewhere
    )


def variables_help(shape: str) -> str:
    """The variables of a launch script for a terminal."""
    lines = []
    for row in rows(shape=shape):
        defaults = ", ".join(dict.fromkeys(row.defaults))
        lines.append(f"  {', '.join(row.names)} ({plain(defaults)})")
        lines.append(f"      {plain(row.text)}")
    return "\n".join(lines) + "\n"


def plain(text: str) -> str:
    """Markdown without its marks of code."""
    return text.replace("`", "")
