"""The values of a parsed body, read with errors that name the path, what was expected and what was found."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from functools import cache
from typing import Final, TypeVar

from tessera.errors import InvalidInput

INT32: Final = 2**31 - 1
_CLIP = 80
_Enum = TypeVar("_Enum", bound=StrEnum)

Json = object
"""A parsed JSON value: dict, list, str, int, float, bool or None."""

JsonObject = dict[str, Json]


@dataclass(frozen=True, slots=True)
class NoText:
    """Stands in a parsed body for a string that is no text; readers of strings refuse it by its path."""

    at: int

    def __str__(self) -> str:
        fault = "half of a surrogate pair, or a byte that is not UTF-8"
        return f"a string that is no text: at character {self.at} is {fault}"


def summarize(value: Json) -> str:
    """A short description of a value for an error message; content that looks like a payload is left out."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return _summarize_text(value)
        case int() | float():
            return clip(repr(value))
        case list():
            return "an empty list" if not value else f"a list of {len(value)}"
        case dict():
            return "an empty object" if not value else f"an object with {len(value)} keys"
        case NoText():
            return str(value)
        case _:
            return f"a {type(value).__name__}"


def _summarize_text(value: str) -> str:
    if not value:
        return "an empty string"
    if "data:" in value[:4096] or (len(value) > 256 and " " not in value[:256]):
        return f"a string of {len(value)} characters"
    return repr(clip(value))


def clip(text: str) -> str:
    return text if len(text) <= _CLIP else text[: _CLIP - 3] + "..."


def expected(param: str, what: str, found: Json) -> InvalidInput:
    return InvalidInput(f"{param}: expected {what}, found {summarize(found)}", param=param)


def reject_unknown(value: JsonObject, allowed: Collection[str], param: str) -> None:
    """Raise for the first key that is not in ``allowed``; ``param`` is empty for the body itself."""
    if value.keys() <= allowed if isinstance(allowed, set | frozenset) else all(k in allowed for k in value):
        return
    key = next(key for key in value if key not in allowed)
    path = join(param, clip(key))
    close = get_close_matches(clip(key), allowed, n=1)
    meant = f"did you mean {close[0]}? The" if close else "the"
    raise InvalidInput(
        f"{path}: unknown key; {meant} known keys are {', '.join(sorted(allowed))}", param=path
    )


def join(param: str, key: str) -> str:
    return f"{param}.{key}" if param else key


def json_object(value: Json) -> JsonObject:
    """The body itself, which every route wants to be an object."""
    if not isinstance(value, dict):
        raise InvalidInput(f"expected a JSON object as the body, found {summarize(value)}")
    return value


def request_body(value: Json, known: Collection[str]) -> JsonObject:
    """The body itself, with no key but the known ones: how every client's form is begun."""
    body = json_object(value)
    reject_unknown(body, known, "")
    return body


def reject_inert(body: JsonObject, inert: Mapping[str, tuple[Json, ...]]) -> None:
    """Raise for a field that has no effect here, unless it is null or a value that would change nothing."""
    for name in inert.keys() & body.keys():
        value, harmless = body[name], inert[name]
        # Comparing types as well: to ``==``, False is 0 and True is 1.
        if value is None or any(value == good and type(value) is type(good) for good in harmless):
            continue
        allowed = ", ".join(summarize(good) for good in (None, *harmless))
        raise InvalidInput(
            f"{name}: not supported; accepted only as {allowed}, found {summarize(value)}", param=name
        )


def one_of(body: JsonObject, names: tuple[str, ...]) -> tuple[Json, str]:
    """The value that the body gives under any of the names, and the name; null counts as absent."""
    if body.keys().isdisjoint(names):
        return None, names[0]
    given = [(name, body[name]) for name in names if body.get(name) is not None]
    if not given:
        return None, names[0]
    name, value = given[0]
    for other, contradiction in given[1:]:
        if contradiction != value:
            raise InvalidInput(
                f"{other}: {summarize(contradiction)} contradicts {name}: {summarize(value)}", param=other
            )
    return value, name


def non_empty_list(value: Json, param: str, *, most: int) -> list[Json]:
    if not isinstance(value, list) or not value:
        raise expected(param, "a non-empty list", value)
    if len(value) > most:
        raise expected(param, f"at most {most} items", value)
    return value


def optional_string(body: JsonObject, name: str) -> str | None:
    """A field that is null or absent, or holds text."""
    value = body.get(name)
    if value is not None and (not isinstance(value, str) or not value):
        raise expected(name, "a non-empty string", value)
    return value


def optional_positive(body: JsonObject, name: str) -> int | None:
    """A field that is null or absent, or holds a positive integer of 32 bits."""
    value = body.get(name)
    return None if value is None else positive(value, name)


def optional_boolean(body: JsonObject, name: str, *, default: bool) -> bool:
    """A field that holds true or false, and the default where it is null or absent."""
    value = body.get(name)
    return default if value is None else boolean(value, name)


def string(value: Json, param: str, what: str = "a string") -> str:
    if not isinstance(value, str):
        raise expected(param, what, value)
    return value


def integer(value: Json, param: str, *, low: int, high: int, what: str) -> int:
    """``what`` is for the error; one for a number that is too large says that, however it is written."""
    if isinstance(value, int | float) and value > high:
        raise InvalidInput(
            f"{param}: expected {what}, and {summarize(value)} is too large: the most is {high}", param=param
        )
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise expected(param, what, value)
    return value


def positive(value: Json, param: str) -> int:
    return integer(value, param, low=1, high=INT32, what="a positive integer")


def boolean(value: Json, param: str) -> bool:
    if not isinstance(value, bool):
        raise expected(param, "true or false", value)
    return value


def choice(value: Json, param: str, kind: type[_Enum], aliases: dict[str, _Enum] | None = None) -> _Enum:
    """One of an enumeration's values, or one of the aliases for them."""
    found: _Enum | None = _members(kind).get(value) if isinstance(value, str) else None
    if found is None and aliases and isinstance(value, str):
        found = aliases.get(value)
    if found is None:
        raise expected(param, f"one of {', '.join((*_members(kind), *(aliases or ())))}", value)
    return found


@cache
def _members(kind: type[_Enum]) -> dict[str, _Enum]:
    return {member.value: member for member in kind}
