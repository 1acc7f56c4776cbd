"""Reads and describes a client's body by one declaration: a Struct with the client's own field names.

A field's type is what the translation of the body takes. Beside it, in ``Annotated``, stands a ``Kind``,
which reads the JSON value and holds its schema, and where needed ``Also`` with the field's other names and
``msgspec.Meta`` with its description. A field without a default is required. ``Form`` makes the reader and
the schema of the whole; null counts as absent.

``msgspec`` does not read the values itself: its errors name neither the value nor the other names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Final, Generic, TypeVar, get_args

import msgspec

from tessera.frontend.api.schema import BOOLEAN, INSTRUCTION, STRING, Schema, inert_schemas, list_of, nullable
from tessera.frontend.api.values import (
    INT32,
    Json,
    boolean,
    expected,
    filled_string,
    integer,
    json_object,
    non_empty_list,
    one_of,
    reject_inert,
    reject_unknown,
    string,
)

B = TypeVar("B", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Kind:
    """Reads a field's value, which errors call by its path, and describes it.

    ``write`` makes the JSON value of a default.
    """

    read: Callable[[Json, str], Any]
    schema: Schema
    write: Callable[[Any], Json] = lambda value: value


def about(description: str, *examples: Json) -> msgspec.Meta:
    """Describe a field, with values that it may have."""
    return msgspec.Meta(description=description, examples=list(examples) or None)


class Also:
    """Names a field as other clients do; two names with different values contradict each other."""

    def __init__(self, *names: str) -> None:
        self.names = names


def unread(schema: Schema) -> Kind:
    """Pass a value on as it is, to a reader that needs more than the value."""
    return Kind(lambda value, _: value, schema)


def named(known: Mapping[str, object] | type[StrEnum], expects: str = "", **more: object) -> Kind:
    """Read a name as what it stands for; ``expects`` is for the error."""
    members = known if isinstance(known, Mapping) else {member.value: member for member in known}
    values = {**members, **more}
    what = expects or f"one of {', '.join(values)}"

    def read(value: Json, path: str) -> object:
        if not isinstance(value, str) or value not in values:
            raise expected(path, what, value)
        return values[value]

    def write(default: object) -> Json:
        return next((name for name, value in values.items() if value == default), None)

    return Kind(read, {"type": "string", "enum": list(values)}, write)


def whole(what: str, low: int, high: int = INT32) -> Kind:
    """Read a whole number; ``what`` is for the error."""
    schema = {"type": "integer", "minimum": low, "maximum": high}
    return Kind(partial(integer, low=low, high=high, what=what), schema)


def several(kind: Kind, most: int) -> Kind:
    """Read a list of one to ``most`` values as a tuple."""

    def read(value: Json, path: str) -> tuple[Any, ...]:
        items = non_empty_list(value, path, most=most)
        return tuple([kind.read(item, f"{path}[{index}]") for index, item in enumerate(items)])

    return Kind(read, list_of(kind.schema), lambda default: [kind.write(value) for value in default])


FLAG: Final = Kind(boolean, BOOLEAN)
Flag = Annotated[bool, FLAG]
String = Annotated[str, Kind(string, STRING)]
Text = Annotated[str | None, Kind(filled_string, STRING)]
Instruction = Annotated[
    Json,
    unread(INSTRUCTION),
    msgspec.Meta(examples=["Given a web search query, retrieve passages that answer it"]),
]
ModelName = Annotated[
    str | None,
    Kind(filled_string, STRING),
    about(
        "The name of a model, as `GET /v1/models` lists it. It may be left out where one model alone answers "
        "the route.",
        "nvidia/llama-nemotron-embed-vl-1b-v2",
    ),
]
Positive = Annotated[int | None, whole("a positive integer", 1)]
Width = Annotated[
    Positive, about("The number of values of a vector, one of those that the model offers.", 256)
]
CutOrError = Annotated[Flag, about("Whether inputs that are too long are cut, or an error.")]
MostResults = Annotated[Positive, about("The most results.", 3)]


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    names: tuple[str, ...]
    kind: Kind
    schema: Schema


class Form(Generic[B]):
    """Reads bodies as a Struct, and has their schema, whose title is the Struct's name.

    ``inert`` are fields without effect and the values besides null that they may have; ``schema`` is what a
    schema says beside its properties.
    """

    def __init__(
        self, body: type[B], *, inert: Mapping[str, tuple[Json, ...]] | None = None, **schema: Any
    ) -> None:
        self._body = body
        self._inert: Final = inert or {}
        declared = msgspec.structs.fields(body)
        self._fields = {name: field for field in map(_field, declared) for name in field.names}
        self._required = tuple(field.name for field in declared if field.required)
        described = {name: field.schema for name, field in self._fields.items()}
        self.names: Final = frozenset((*described, *self._inert))
        self.schema: Final[Schema] = {
            "type": "object",
            "title": body.__name__,
            "properties": described | inert_schemas(self._inert),
            "required": list(self._required),
            "additionalProperties": False,
            **schema,
        }

    def read(self, value: Json, inert: Mapping[str, tuple[Json, ...]] | None = None) -> B:
        """Read a body, in which other values may be ``inert``; raises ``InvalidInput``."""
        body = json_object(value)
        reject_unknown(body, self.names, "")
        reject_inert(body, self._inert if inert is None else inert)
        values: dict[str, Any] = {}
        for key, given in body.items():
            field = self._fields.get(key)
            if given is None or field is None or field.name in values:
                continue
            found, path = one_of(body, field.names) if len(field.names) > 1 else (given, key)
            values[field.name] = field.kind.read(found, path)
        for name in self._required:
            if name not in values:
                # Raises what was expected, unless that is for the translation to say.
                values[name] = self._fields[name].kind.read(None, name)
        return self._body(**values)


def _field(field: msgspec.structs.FieldInfo) -> _Field:
    extras = get_args(field.type)[1:]
    (kind,) = (extra for extra in extras if isinstance(extra, Kind))
    others = [name for extra in extras if isinstance(extra, Also) for name in extra.names]
    schema = dict(kind.schema)
    # On the whole, where /docs shows it.
    notes = {name: schema.pop(name) for name in ("description",) if name in schema}
    for meta in (extra for extra in extras if isinstance(extra, msgspec.Meta)):
        given = {"description": meta.description, "examples": meta.examples}
        notes |= {name: note for name, note in given.items() if note is not None}
    default = None if field.required or field.default is None else kind.write(field.default)
    if default not in (None, []):
        notes["default"] = default
    notes.setdefault("examples", _examples(schema, default))
    taken = schema if field.required else nullable(schema)
    return _Field(field.name, (field.name, *others), kind, taken | notes)


def _examples(schema: Schema, default: Json) -> list[Json]:
    """Return a value of a few that is not the default; none where the values are not few."""
    values = schema.get("enum", [True, False] if schema.get("type") == "boolean" else [])
    return [value for value in values if value != default][:1]
