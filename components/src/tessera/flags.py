"""Reads settings from command lines, and values from files."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, TypeVar, get_origin

import msgspec

from tessera.command import OneLineParser
from tessera.errors import ConfigError
from tessera.settings import Field, fields_of, is_link
from tessera.terminal import near

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")


class HelpFormatter(argparse.HelpFormatter):
    """Ends the help of a flag with its default, where it has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        said = action.help or ""
        if action.default is argparse.SUPPRESS or isinstance(action.default, bool) or "%(default)" in said:
            return said
        return f"{said} (default: %(default)s)" if action.default not in (None, [], "") else said


def parse_flags(settings: type[S], argv: Sequence[str] | None = None, *, prog: str, description: str) -> S:
    """A command line as settings.

    Raises ``ConfigError`` for values that argparse cannot judge; exits with status 2 for the rest.
    """
    parser = OneLineParser(prog=prog, description=description, formatter_class=HelpFormatter)
    add_flags(parser, settings)
    take_variables(parser, settings)
    return read_flags(settings, parser.parse_args(argv))


def add_flags(
    parser: argparse.ArgumentParser,
    settings: type[msgspec.Struct],
    group: argparse._ArgumentGroup | None = None,
) -> None:
    """Give the parser, or a group of it, the flags of the settings and of their parts, in their order.

    A part's group is the parser's as well: argparse shows no group of a group, and has none from 3.14 on.
    """
    for field in fields_of(settings):
        if field.part is not None:
            title = field.setting.group
            add_flags(parser, field.part, parser.add_argument_group(title) if title else group)
        elif field.setting.flag:
            (group or parser).add_argument(field.setting.flag, **_argument(field))


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


def check_flags(settings: type[S], words: Sequence[str]) -> S:
    """What words mean; raises ``ConfigError`` for those that a program with these settings would refuse."""
    parser = _CheckingParser(add_help=False, allow_abbrev=False)
    add_flags(parser, settings)
    return read_flags(settings, parser.parse_args(words))


def take_variables(
    parser: argparse.ArgumentParser,
    settings: type[msgspec.Struct],
    environment: Mapping[str, str] | None = None,
) -> None:
    """Make what variables say the defaults of a parser with the flags of these settings.

    Raises ``ConfigError`` naming the variable for a value that its flag would refuse.
    """
    environment = os.environ if environment is None else environment
    for field in flag_fields(settings):
        text = environment.get(field.variable, "")
        if not text or is_link(field.variable, text):
            continue
        flag = field.setting.flag
        single = _CheckingParser(add_help=False, allow_abbrev=False)
        action = single.add_argument(flag, **_argument(field))
        try:
            words = words_of(flag, action.nargs, text, off=len(action.option_strings) > 1)
            value = getattr(single.parse_args(words), action.dest)
            _value(field, value)
        except ConfigError as error:
            raise ConfigError(f"{field.variable}={text}: {without_flag(error.message, flag)}") from error
        parser.set_defaults(**{action.dest: value})
        for own in parser._actions:
            if own.dest == action.dest:
                own.required = False


def flag_fields(settings: type[msgspec.Struct]) -> Iterator[Field]:
    """The fields that have flags, also those of parts."""
    for field in fields_of(settings):
        if field.part is not None:
            yield from flag_fields(field.part)
        elif field.setting.flag:
            yield field


def words_of(flag: str, nargs: int | str | None, text: str, *, off: bool) -> list[str]:
    """The words of a command line for what a variable says of a flag with so many values.

    ``off`` says that a flag without values has an opposite. Raises ``ConfigError``.
    """
    if nargs is None:
        return [f"{flag}={text}"]
    if nargs:
        return [flag, *filter(None, re.split(r"[\s,]+", text))]
    match text.strip().lower():
        case "1" | "on" | "true" | "yes":
            return [flag]
        case "0" | "off" | "false" | "no":
            return [flag.replace("--", "--no-", 1)] if off else []
        case _:
            raise ConfigError(f"{flag}: expected on or off")


def without_flag(message: str, flag: str) -> str:
    """An error about a flag's value without the flag, for one that was given in another way."""
    return message.removeprefix("argument ").removeprefix(flag).lstrip(" :")


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
    if field.default is MISSING:
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
    except RecursionError:
        raise ConfigError(f"{flag}: not valid JSON: it is nested too deeply") from None


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
        meant = ""
        if (unknown := _UNKNOWN_KEY.match(str(error))) and hasattr(kind, "__struct_fields__"):
            meant = near(unknown[1], list(_keys(kind)))
        raise ConfigError(f"{source}: {error}{meant}") from error


# As msgspec says it.
_UNKNOWN_KEY: Final = re.compile("Object contains unknown field `(.*?)`")


def _keys(settings: type) -> Iterator[str]:
    """The keys of settings and of their parts."""
    for field in fields_of(settings):
        yield field.name
        if field.part is not None:
            yield from _keys(field.part)


def _decode(kind: type, value: object) -> object:
    if kind is Path:
        if isinstance(value, str):
            return Path(value)
        raise ValueError(f"Expected `str`, got `{type(value).__name__}`")
    raise NotImplementedError(f"cannot read a {kind.__name__}")
