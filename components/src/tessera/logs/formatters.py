"""A log record as a line of text, or as one JSON object."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

import orjson

from tessera.logs.request_line import Value, current_line
from tessera.logs.scrub import scrub

# The names that Dynamo's runtime uses in its own JSON lines.
_LEVELS: Final = {"WARNING": "WARN"}

# Whatever could end a line, or move a terminal's cursor.
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_UNSEEN = re.compile(r"[\x7f-\x9f\u2028\u2029]")
_BARE = re.compile(r"[!#-~]+")


def fields_of(record: logging.LogRecord) -> dict[str, Value]:
    """The request's id and what the line says beside its message."""
    own: Mapping[str, Value] = getattr(record, "fields", {})
    fields = {name: value for name, value in own.items() if value is not None}
    if "request_id" not in fields and (line := current_line()) is not None:
        fields = {"request_id": line.request_id, **fields}
    return {name: scrub(value) if isinstance(value, str) else value for name, value in fields.items()}


class TextFormatter(logging.Formatter):
    """For people: ``time role[process] LEVEL name: message name=value…``.

    What follows a line break is indented, so that nobody's text can pass for a line of its own.
    """

    def __init__(self, role: str) -> None:
        super().__init__(f"%(asctime)s {role}[%(process)d] %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        text = scrub(super().format(record))
        head, *rest = _CONTROL.sub(_escaped, text).split("\n")
        pairs = [f"{name}={_plain(value)}" for name, value in fields_of(record).items()]
        return "\n  ".join([" ".join([head, *pairs]), *rest])


class JsonFormatter(logging.Formatter):
    """For machines: one object a line, with Dynamo's names for what its lines say, too."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Value] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")[:-6] + "Z",
            "level": _LEVELS.get(record.levelname, record.levelname),
            "target": record.name,
            "role": self._role,
            "pid": record.process,
            "message": scrub(record.getMessage()),
        }
        line |= fields_of(record)
        if record.exc_info:
            line["exception"] = scrub(self.formatException(record.exc_info))
        return _json(line)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def _plain(value: Value) -> str:
    text = str(value)
    return text if _BARE.fullmatch(text) else _json(text)


def _json(value: Value | dict[str, Value]) -> str:
    text = orjson.dumps(_encodable(value), default=str).decode()
    # JSON lets these stand in a string as they are; many readers take them for the line's end.
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _encodable(value: Value | dict[str, Value]) -> Value | dict[str, Value]:
    """Without lone surrogates, which cannot be written as JSON."""
    if isinstance(value, dict):
        return {name: _text(entry) for name, entry in value.items()}
    return _text(value)


def _text(value: Value) -> Value:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
