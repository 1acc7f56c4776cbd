"""JSON values of a body, read with errors that name the path, what was expected and what was found.

Lists and objects are counted before a body is parsed, and strings that are no text are marked in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final, TypeGuard

import orjson

from tessera.errors import InvalidInput
from tessera.frontend.api.pieces import (
    Parser,
    filled,
    in_pieces,
    more_outside_strings,
    without_long_strings,
    without_numbers,
)

INT32: Final = 2**31 - 1
_CLIP = 80
BRACKETS: Final = 200_000
"""Lists and objects of a body, at most: 24 for each of 8,192 inputs.

A conversation of three messages with a part each has ten, a content part with an image two. 200,000 empty
lists take 40 ms to parse; 20 million, in 60 MB, took 4 GB and stopped a frontend for 19 s.
"""
BRACKETS_AN_INPUT: Final = 24
# Values for each list or object, at most: 512 token ids for each of 8,192 inputs, or one input of as many ids
# as a text has characters.
_VALUES: Final = 21
# Values that are not in long lists of numbers: 600,000 strings take 60 ms to parse.
_OTHER_VALUES: Final = 3
# Larger bodies are parsed in pieces: 57 MB with accents keep the interpreter for 0.3 s.
_WHOLE_BYTES: Final = 4 << 20

Json = object
"""A parsed JSON value: dict, list, str, int, float, bool or None.

In large bodies a long list of numbers is an ``array``, see ``pieces``.
"""

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
        case list() | array():
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
    return InvalidInput.at(param, f"expected {what}, found {summarize(found)}")


def reject_unknown(value: JsonObject, allowed: Collection[str], param: str) -> None:
    """Raise for the first key that is not in ``allowed``; ``param`` is empty for the body itself."""
    if value.keys() <= allowed if isinstance(allowed, set | frozenset) else all(k in allowed for k in value):
        return
    key = next(key for key in value if key not in allowed)
    path = join(param, clip(key))
    close = get_close_matches(clip(key), allowed, n=1)
    meant = f"did you mean {close[0]}?" if close else f"the known keys are {', '.join(sorted(allowed))}"
    raise InvalidInput.at(path, f"unknown key; {meant}")


def join(param: str, key: str) -> str:
    return f"{param}.{key}" if param else key


def read_json(raw: bytes, content_type: str = "", *, brackets: int = BRACKETS) -> Json:
    """Parse a request body; raises ``InvalidInput`` for anything that is not one JSON value in UTF-8.

    ``content_type`` is the header's value. It is no reason to refuse anything, and a likely one for what
    cannot be parsed. A string that is no text is refused by its path, or is a ``NoText`` in the body of a
    client that wants the other inputs' vectors.
    """
    if len(raw) > brackets and _is_large(raw, brackets):
        return _read_in_pieces(raw, content_type, brackets)
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return _read_marked(raw, content_type, error)


def _is_large(raw: bytes, brackets: int) -> bool:
    """Return whether others would notice that a body is parsed at once."""
    at_once = _OTHER_VALUES * brackets
    return (
        len(raw) > _WHOLE_BYTES
        or more_outside_strings(raw, b"[{", brackets)
        or (len(raw) > 2 * at_once and more_outside_strings(raw, b",", at_once))
    )


def _too_many(most: int, things: str) -> InvalidInput:
    return InvalidInput(f"the body has more than {most} {things}")


def _read_in_pieces(raw: bytes, content_type: str, brackets: int) -> Json:
    """Parse a large body; raises ``InvalidInput`` for too much in it, before that is parsed."""
    taken: dict[str, Json] = {}
    parser = Parser()
    most, at_once = _VALUES * brackets, _OTHER_VALUES * brackets
    try:
        rest = without_long_strings(raw, taken, parser)
        if more_outside_strings(rest, b"[{", brackets):
            raise _too_many(brackets, "lists and objects; send fewer inputs at a time")
        if more_outside_strings(rest, b",", at_once):
            if more_outside_strings(rest, b",", most):
                raise _too_many(most, "values; send fewer at a time")
            rest = without_numbers(rest, taken)
            if more_outside_strings(rest, b",", at_once):
                raise _too_many(at_once, "values outside long lists of numbers; send fewer at a time")
        value = filled(in_pieces(rest, parser), taken)
    except orjson.JSONDecodeError as error:
        raise _not_json(content_type, error.msg) from None
    return value if parser.fault is None else _judged(value, content_type, parser.fault.msg)


def _read_marked(raw: bytes, content_type: str, error: orjson.JSONDecodeError) -> Json:
    """Parse a body that the strict parser refused; raises ``InvalidInput`` unless strings alone are wrong."""
    try:
        value = Parser().parse(raw)
    except orjson.JSONDecodeError:
        raise _not_json(content_type, str(error)) from None
    return _judged(value, content_type, str(error))


def _judged(value: Json, content_type: str, why: str) -> Json:
    """Return a body with marks to a client that wants the other inputs' vectors; others get the first error.

    A ``NoText`` stands in it for each string that is no text.
    """
    faults: list[InvalidInput] = []
    marked = _marked(value, "", faults)
    if not faults:
        raise _not_json(content_type, why) from None
    if isinstance(marked, dict) and marked.get("partial") is True:
        return marked
    raise faults[0] from None


def _not_json(content_type: str, why: str) -> InvalidInput:
    kind = content_type.partition(";")[0].strip().lower()
    named = kind and not kind.endswith(("/json", "+json"))
    other = f", and its Content-Type is {clip(kind)}, not application/json" if named else ""
    return InvalidInput(f"the body is not valid JSON{other}: {why}")


def _marked(value: Json, path: str, faults: list[InvalidInput]) -> Json:
    match value:
        case str():
            at = _no_text_at(value)
            if at is None:
                return value
            mark = NoText(at)
            faults.append(InvalidInput(f"{path or 'the body'}: {mark}", param=path or None))
            return mark
        case list():
            return [_marked(item, f"{path}[{index}]", faults) for index, item in enumerate(value)]
        case dict():
            return {name: _marked(item, join(path, clip(name)), faults) for name, item in value.items()}
        case _:
            return value


def _no_text_at(text: str) -> int | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def json_object(value: Json) -> JsonObject:
    """The body itself, which every route wants to be an object."""
    if not isinstance(value, dict):
        raise InvalidInput(f"expected a JSON object as the body, found {summarize(value)}")
    return value


def reject_inert(body: JsonObject, inert: Mapping[str, tuple[Json, ...]]) -> None:
    """Raise for a field that has no effect here, unless it is null or a value that would change nothing."""
    for name in inert.keys() & body.keys():
        value, harmless = body[name], inert[name]
        # Comparing types as well: to ``==``, False is 0 and True is 1.
        if value is None or any(value == good and type(value) is type(good) for good in harmless):
            continue
        allowed = ", ".join(summarize(good) for good in (None, *harmless))
        raise InvalidInput.at(name, f"not supported; accepted only as {allowed}, found {summarize(value)}")


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
            raise InvalidInput.at(other, f"{summarize(contradiction)} contradicts {name}: {summarize(value)}")
    return value, name


def known_object(value: Json, param: str, what: str, known: Collection[str]) -> JsonObject:
    """The object itself, if it has no other keys than the ``known`` ones; ``what`` is for the error."""
    if not isinstance(value, dict):
        raise expected(param, what, value)
    reject_unknown(value, known, param)
    return value


def is_list(value: Json) -> TypeGuard[Sequence[Json]]:
    """Whether it is a list, in whichever form."""
    return isinstance(value, list | array)


def plain_list(value: Json, param: str, what: str = "a list") -> Sequence[Json]:
    if not is_list(value):
        raise expected(param, what, value)
    return value


def non_empty_list(value: Json, param: str, *, most: int) -> Sequence[Json]:
    if not is_list(value) or not value:
        raise expected(param, "a non-empty list", value)
    if len(value) > most:
        raise expected(param, f"at most {most} items", value)
    return value


def filled_string(value: Json, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise expected(param, "a non-empty string", value)
    return value


def string(value: Json, param: str, what: str = "a string") -> str:
    if not isinstance(value, str):
        raise expected(param, what, value)
    return value


def integer(value: Json, param: str, *, low: int, high: int, what: str) -> int:
    """``what`` is for the error; one for a number that is too large says that, however it is written."""
    if isinstance(value, int | float) and value > high:
        raise InvalidInput.at(
            param, f"expected {what}, and {summarize(value)} is too large: the most is {high}"
        )
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise expected(param, what, value)
    return value


def boolean(value: Json, param: str) -> bool:
    if not isinstance(value, bool):
        raise expected(param, "true or false", value)
    return value
