"""Settings that are written once: as annotated fields of frozen Structs.

A field's ``Setting`` holds its flag, its unit, its check and what it means. The command line with its
``--help`` and its errors, and the tables in ``docs/`` (by ``docs/tables.py``) are made from that. Each part
of a process's settings stands beside the code that it is for, which takes it as it is; the process puts its
parts together. Nothing below a ``main`` reads flags or files.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn, TypeVar, Union, get_args, get_origin

import msgspec

from tessera.errors import ConfigError

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")

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
# Beyond it a socket would take the lower 16 bits.
PORT: Final = Number(text="{flag} must be 0 to 65535, not {value}", below=1 << 16)

CHOSEN: Final = "0: chosen from the model and the machine"
"""What the help says of numbers that ``tessera.defaults`` has something for."""

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
        help="the names that requests may use; the first is what answers, metrics and logs say. ORG/NAME or "
        "the checkpoint directory's name by default",
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
Traces = Annotated[
    bool | None,
    Setting(
        flag="--traces",
        help="export OpenTelemetry traces, as OTEL_* variables say; on where OTEL_TRACES_EXPORTER is set",
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
    """A field of a settings Struct. ``kind`` is its type without None and annotations."""

    name: str
    kind: Any
    setting: Setting
    default: Any

    @property
    def part(self) -> type[msgspec.Struct] | None:
        """The Struct that it is, with settings of its own; None for a value."""
        return self.kind if isinstance(self.kind, type) and issubclass(self.kind, msgspec.Struct) else None

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
        if self.default in (msgspec.NODEFAULT, None, "", (), frozenset(), {}):
            return None
        if isinstance(self.default, StrEnum):
            return self.default.value
        return self.default / self.setting.unit if self.setting.unit > 1 else self.default


def fields_of(settings: type[msgspec.Struct]) -> Iterator[Field]:
    """All fields, in their order, also those that are no settings: without a ``Setting``, and no Struct."""
    for field in msgspec.structs.fields(settings):
        kind, setting = field.type, Setting()
        if get_origin(kind) is Annotated:
            kind, *extras = get_args(kind)
            setting = next((extra for extra in extras if isinstance(extra, Setting)), setting)
        if get_origin(kind) in (Union, types.UnionType):
            (kind,) = (each for each in get_args(kind) if each is not type(None))
        # msgspec makes an empty dict anew for each Struct.
        default = {} if field.default_factory is dict else field.default
        yield Field(name=field.name, kind=kind, setting=setting, default=default)


class HelpFormatter(argparse.HelpFormatter):
    """Ends the help of a flag with its default, where it has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        said = action.help or ""
        if action.default is argparse.SUPPRESS or isinstance(action.default, bool) or "%(default)" in said:
            return said
        return f"{said} (default: %(default)s)" if action.default not in (None, []) else said


def parse_flags(settings: type[S], argv: Sequence[str] | None = None, *, prog: str, description: str) -> S:
    """A command line as settings.

    Raises ``ConfigError`` for values that argparse cannot judge; exits with status 2 for the rest.
    """
    parser = argparse.ArgumentParser(prog=prog, description=description, formatter_class=HelpFormatter)
    add_flags(parser, settings)
    return read_flags(settings, parser.parse_args(argv))


def add_flags(parser: argparse._ActionsContainer, settings: type[msgspec.Struct]) -> None:
    """Give the parser, or a group of it, the flags of the settings and of their parts, in their order."""
    for field in fields_of(settings):
        if field.part is not None:
            group = field.setting.group
            add_flags(parser.add_argument_group(group) if group else parser, field.part)
        elif field.setting.flag:
            parser.add_argument(field.setting.flag, **_argument(field))


def read_flags(settings: type[S], parsed: argparse.Namespace) -> S:
    """What was parsed by a parser with ``add_flags``; raises ``ConfigError`` for what a check refuses."""
    values: dict[str, Any] = {}
    for field in fields_of(settings):
        if field.part is not None:
            if _has_flags(field.part):
                values[field.name] = read_flags(field.part, parsed)
        elif field.setting.flag:
            given = getattr(parsed, field.setting.flag.removeprefix("--").replace("-", "_"))
            if given is not None:
                values[field.name] = _value(field, given)
    return settings(**values)


def check_flags(settings: type[msgspec.Struct], words: Sequence[str]) -> None:
    """Raise ``ConfigError`` for words that a program with these settings would refuse."""
    parser = _CheckingParser(add_help=False, allow_abbrev=False)
    add_flags(parser, settings)
    read_flags(settings, parser.parse_args(words))


class _CheckingParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _has_flags(settings: type[msgspec.Struct]) -> bool:
    return any(
        field.setting.flag or (field.part is not None and _has_flags(field.part))
        for field in fields_of(settings)
    )


def flags_of(settings: type[msgspec.Struct]) -> dict[str, int | str | None]:
    """Every flag with the number of values that it takes, as argparse writes it: None for one."""
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser, settings)
    return {flag: action.nargs for action in parser._actions for flag in action.option_strings}


def _argument(field: Field) -> dict[str, Any]:
    """What argparse has to know of a flag."""
    said: dict[str, Any] = {"help": field.setting.help, "default": field.shown}
    if field.kind is bool:
        return said | {"action": "store_true" if field.default is False else argparse.BooleanOptionalAction}
    if field.setting.metavar:
        said["metavar"] = field.setting.metavar
    if field.default is msgspec.NODEFAULT:
        said["required"] = True
    if get_origin(field.kind) in (tuple, frozenset):
        return said | {"nargs": "*"}
    if field.choices:
        return said | {"choices": field.choices}
    if get_origin(field.kind) is dict:
        return said | {"type": str}
    return said | {"type": float if field.setting.unit > 1 else field.kind}


def _value(field: Field, given: Any) -> Any:
    setting = field.setting
    if setting.check is not None and (refusal := setting.check(setting.flag, given)) is not None:
        raise ConfigError(refusal)
    if setting.unit > 1:
        return int(given * setting.unit)
    if get_origin(field.kind) is dict:
        return json_object(given, setting.flag)
    return given if get_origin(field.kind) is Literal else (get_origin(field.kind) or field.kind)(given)


def json_object(text: str, flag: str) -> dict[str, Any]:
    """A flag's JSON object; raises ``ConfigError`` naming the flag for anything else."""
    try:
        return mapping(json.loads(text), flag)
    except ValueError as error:
        raise ConfigError(f"{flag}: not valid JSON: {error}") from error


def mapping(value: object, source: str) -> dict[str, Any]:
    """``value`` itself; raises ``ConfigError`` naming ``source`` where it is not a mapping."""
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: must hold a mapping, not {type(value).__name__}")
    return value


def convert(kind: type[T], value: object, source: str) -> T:
    """``value`` as ``kind``; raises ``ConfigError`` naming ``source``, the key and what was expected."""
    try:
        return msgspec.convert(value, kind, dec_hook=_decode)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{source}: {error}") from error


def _decode(kind: type, value: object) -> object:
    if kind is Path:
        if isinstance(value, str):
            return Path(value)
        raise ValueError(f"Expected `str`, got `{type(value).__name__}`")
    raise NotImplementedError(f"cannot read a {kind.__name__}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting or several of the same meaning, for a table in the docs."""

    names: tuple[str, ...]
    defaults: tuple[str, ...]
    text: str


def rows_of(settings: type[msgspec.Struct], *names: str) -> list[Row]:
    """What to write about flags and keys: of these names, or all, in the order of the settings.

    Neighbours that mean the same share a row. A key below another one is written with a dot between.
    """
    rows: list[Row] = []
    for name, field in _named(settings, ""):
        if names and name not in names:
            continue
        text = ". ".join(each for each in (field.setting.help, field.setting.more) if each)
        if field.choices:
            text += f" ({', '.join(f'`{choice}`' for choice in field.choices)})"
        row = Row(names=(name,), defaults=(_written(field),), text=text)
        if rows and rows[-1].text == text:
            before = rows.pop()
            row = replace(row, names=before.names + row.names, defaults=before.defaults + row.defaults)
        rows.append(row)
    missing = set(names).difference(*(row.names for row in rows))
    if missing:
        raise ConfigError(f"{settings.__name__} has no {', '.join(sorted(missing))}")
    return rows


def _named(settings: type[msgspec.Struct], prefix: str) -> Iterator[tuple[str, Field]]:
    for field in fields_of(settings):
        if isinstance(field.default, msgspec.Struct) and not field.setting.help:
            for name, inner in _named(type(field.default), f"{prefix}{field.name}."):
                # What the whole has for it, where that is not the part's own.
                yield name, replace(inner, default=getattr(field.default, inner.name, inner.default))
        elif field.setting.help:
            yield field.setting.flag or prefix + field.name, field


def _written(field: Field) -> str:
    shown = field.shown
    if isinstance(shown, bool):
        return "on" if shown else "off"
    if shown is None or isinstance(shown, tuple):
        return ""
    if isinstance(shown, msgspec.Struct):
        shown = msgspec.to_builtins(shown)
    return f"{shown:g}" if isinstance(shown, float) else str(shown)
