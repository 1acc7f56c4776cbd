"""Settings that are written once: as annotated fields of frozen Structs, or of the launcher's dataclasses.

A field's ``Setting`` holds its flag, its unit, its check and what it means. The command line with its
``--help`` and its errors (by ``flags``), and the tables in ``docs/`` (by ``docs/tables.py``) are made from
that. Each part of a process's settings stands beside the code that it is for, which takes it as it is; the
process puts its parts together. Nothing below a ``main`` reads flags or files.

The standard library alone, unless there is a Struct: the launcher runs before anything is installed.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    TypeGuard,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

if TYPE_CHECKING:
    import msgspec

PREFIX: Final = "TESSERA_"
"""What the variable of every setting begins with."""

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

Check = Callable[[str, Any], str | None]
"""(flag, value as it was given) → why it is refused, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is known of a field beside its type and its default.

    ``help`` says what it means, in one line of ``--help``; ``more`` follows in tables alone. ``flag`` is its
    flag; a key of a YAML file has none. The flag's value, which ``check`` judges, times ``unit`` is the
    field's. On a field that is a Struct itself, ``group`` puts the flags below it under this heading.
    """

    help: str = ""
    more: str = ""
    flag: str = ""
    unit: int = 1
    check: Check | None = None
    metavar: str | None = None
    group: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A ``Check`` for numbers from 0 (or above it) up to ``below``; ``text`` is what a refusal says."""

    text: str
    zero: bool = True
    below: float = math.inf

    def __call__(self, flag: str, value: float) -> str | None:
        # Written so that what is no number is refused as well.
        if 0 <= value < self.below and (value != 0 or self.zero):
            return None
        return self.text.format(flag=flag, value=value)


POSITIVE: Final = Number(text="{flag} must be positive, not {value:g}", zero=False)
NOT_NEGATIVE: Final = Number(text="{flag} must be 0 or more, not {value:g}")
SHARE: Final = Number(text="{flag} must be 0 to 1, not {value:g}", below=math.nextafter(1.0, 2.0))
# Beyond it a socket would take the lower 16 bits.
PORT: Final = Number(text="{flag} must be 0 to 65535, not {value}", below=1 << 16)

CHOSEN: Final = "0: chosen from the model and the machine"
"""What the help says of numbers that ``tessera.defaults`` has something for."""

# As Kubernetes calls what it tells of services, among them one whose name is ``tessera``.
_OF_KUBERNETES: Final = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$")


def is_link(name: str, value: str) -> bool:
    """Whether a variable is how Kubernetes tells a pod of a service, such as ``TESSERA_PORT=tcp://...``."""
    return _OF_KUBERNETES.search(name) is not None or (
        name.endswith("_PORT") and value.startswith(("tcp://", "udp://", "sctp://"))
    )


# What more than one process has.
ModelPath = Annotated[
    Path,
    Setting(
        flag="--model-path", help="a checkpoint directory, or ORG/NAME[@REVISION] of a hub to download once"
    ),
]
Revision = Annotated[
    str, Setting(flag="--revision", help="the branch, tag or commit of a hub's model; main by default")
]
ServedModelNames = Annotated[
    tuple[str, ...],
    Setting(
        flag="--served-model-name",
        metavar="NAME",
        help="the names that requests may use; answers, metrics and logs have the first. ORG/NAME or the "
        "checkpoint directory's name by default",
    ),
]
ModelOptions = Annotated[
    dict[str, Any],
    Setting(
        flag="--model-options",
        metavar="JSON",
        help="a JSON object with options of the model's family; the same for frontends and workers",
    ),
]
Namespace = Annotated[str, Setting(flag="--namespace", help="processes of one namespace find each other")]
AccessLogShare = Annotated[
    float,
    Setting(
        flag="--access-log-share",
        check=SHARE,
        help="the share of requests whose lines are written, 0 for none; answers of 500 and above always are",
        more="Frontends and workers write the lines of the same requests",
    ),
]
# Dynamo's own values.
DiscoveryBackend = Annotated[
    Literal["file", "etcd", "kubernetes", "mem"],
    Setting(flag="--discovery-backend", help="where instances are listed"),
]
RequestPlane = Annotated[
    Literal["tcp", "nats"], Setting(flag="--request-plane", help="how processes call each other")
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    Setting(flag="--log-level", help="the lowest level of lines that are logged"),
]
Modality = Literal["multimodal", "text"]
Traces = Annotated[
    bool | None,
    Setting(
        flag="--traces",
        help="export OpenTelemetry traces by the OTEL_* variables; on if OTEL_TRACES_EXPORTER is set",
    ),
]


def served_names(given: Sequence[str], default: str) -> tuple[str, ...]:
    """The names of a model, each once."""
    return tuple(dict.fromkeys(filter(None, given))) or (default,)


def exporters(traces: bool | None, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Where traces go, by the flag and by OpenTelemetry's own variables; nowhere: no traces."""
    if traces is False or environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ()
    named = environment.get("OTEL_TRACES_EXPORTER", "").split(",")
    names = tuple(dict.fromkeys(name.strip() for name in named if name.strip() not in ("", "none")))
    return names or (("otlp",) if traces else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of settings. ``kind`` is its type without None and annotations.

    ``notes`` are what else its annotation holds.
    """

    name: str
    kind: Any
    setting: Setting
    default: Any
    notes: tuple[Any, ...] = ()

    @property
    def variable(self) -> str:
        """The environment variable that sets it, by its flag or, where it has none, by its name."""
        return PREFIX + (self.setting.flag.removeprefix("--").replace("-", "_") or self.name).upper()

    @property
    def part(self) -> type[msgspec.Struct] | None:
        """The Struct that it is, with settings of its own; None for a value."""
        return self.kind if _is_struct(self.kind) else None

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts that it may be, empty where it is not one of a few."""
        if get_origin(self.kind) is Literal:
            return get_args(self.kind)
        if isinstance(self.kind, type) and issubclass(self.kind, StrEnum):
            return tuple(member.value for member in self.kind)
        return ()

    @property
    def shown(self) -> Any:
        """The default as it would be written: in the flag's unit, None where there is none to write."""
        if self.default in (MISSING, None, "", (), frozenset(), {}):
            return None
        if isinstance(self.default, StrEnum):
            return self.default.value
        return self.default / self.setting.unit if self.setting.unit > 1 else self.default

    @property
    def text(self) -> str:
        """What tables say of it: what it means, and what it may be."""
        text = ". ".join(part for part in (self.setting.help, self.setting.more) if part)
        return f"{text} ({', '.join(f'`{choice}`' for choice in self.choices)})" if self.choices else text


def fields_of(settings: type) -> Iterator[Field]:
    """All fields, in their order, also those that are no settings: without a ``Setting``, and no Struct.

    The default of a field that has none is ``MISSING``.
    """
    hints = get_type_hints(settings, include_extras=True)
    for name, default in _defaults(settings):
        kind, *notes = get_args(hints[name]) if get_origin(hints[name]) is Annotated else [hints[name]]
        setting = next((note for note in notes if isinstance(note, Setting)), Setting())
        if get_origin(kind) in (Union, types.UnionType):
            (kind,) = (member for member in get_args(kind) if member is not type(None))
        yield Field(name=name, kind=kind, setting=setting, default=default, notes=tuple(notes))


def _defaults(settings: type) -> Iterator[tuple[str, Any]]:
    if not _is_struct(settings):
        yield from ((field.name, field.default) for field in dataclasses.fields(settings))
        return
    import msgspec

    for field in msgspec.structs.fields(settings):
        # msgspec makes an empty dict anew for each Struct.
        default = {} if field.default_factory is dict else field.default
        yield field.name, MISSING if default is msgspec.NODEFAULT else default


def _is_struct(kind: Any) -> TypeGuard[type[msgspec.Struct]]:
    return isinstance(kind, type) and hasattr(kind, "__struct_fields__")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting or several of the same meaning, for a table in the docs."""

    names: tuple[str, ...]
    defaults: tuple[str, ...]
    text: str


def joined(rows: Iterable[Row]) -> list[Row]:
    """The rows with neighbours that mean the same in one."""
    joint = []
    for text, alike in groupby(rows, key=lambda row: row.text):
        same = list(alike)
        names = tuple(name for row in same for name in row.names)
        joint.append(Row(names=names, defaults=tuple(d for row in same for d in row.defaults), text=text))
    return joint
