"""How every process of a deployment logs: to stderr, as text or as JSON, one line for a request.

A process begins a request's line when the request arrives, and writes it when the answer is sent. Code in
between adds fields to it (``note``, ``count``). Other lines that are logged meanwhile carry the request's id.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from types import TracebackType
from typing import Annotated, Final, Literal

import msgspec
import orjson

from tessera.settings import Setting, add_flags, read_flags

Value = str | int | float | None
"""What a line's fields hold; a field that is None is left out."""


@dataclass(slots=True, eq=False)
class RequestLine:
    """``fields`` are in the order in which they are written. Belongs to one event loop."""

    request_id: str
    fields: dict[str, Value] = field(default_factory=dict)


# Tasks and threads that a request begins see its line, too.
_current: ContextVar[RequestLine | None] = ContextVar("tessera_request_line", default=None)


def current_line() -> RequestLine | None:
    """The line of the request that is being served here, None outside one."""
    return _current.get()


@contextmanager
def serving(line: RequestLine) -> Iterator[None]:
    token = _current.set(line)
    try:
        yield
    finally:
        _current.reset(token)


def note(**fields: Value) -> None:
    """Say something about the request that is being served; outside one it is lost."""
    if (line := _current.get()) is not None:
        line.fields.update(fields)


def count(name: str, more: int = 1) -> None:
    """Add to a number on the line of the request that is being served."""
    if (line := _current.get()) is not None:
        before = line.fields.get(name)
        line.fields[name] = more + (before if isinstance(before, int) else 0)


# Room for a traceback. Of a longer one the end says what happened, and the beginning where.
MOST_CHARACTERS: Final = 16_384
_HEAD_CHARACTERS: Final = 4096

# Words as long as this are files in base64, keys, or tokens; ids and hashes are shorter.
_LONG = re.compile(r"[A-Za-z0-9+/=_-]{161,}")
_DATA_URL = re.compile(r"\bdata:[^\s,]{0,200},[^\s'\"]*", re.IGNORECASE)
# User and password, query and fragment; the path may say which image it was.
_URL = re.compile(
    r"\b([a-z][a-z0-9+.-]{0,20}://)(?:[^\s/?#'\"]*@)?([^\s?#'\"]*)(?:[?#][^\s'\"]*)?", re.IGNORECASE
)
_CREDENTIALS = re.compile(r"\b(bearer|basic)\s+[^\s'\",;]+", re.IGNORECASE)
_KEY = re.compile(r"\b((?:x-)?api[-_]?key[\"']?\s*[:=]\s*[\"']?)[^\s'\",;]+", re.IGNORECASE)

# Whatever any of these could match; most texts are short and plain, and there are several in a line.
_SUSPECT = re.compile(r"data:|://|bearer|basic|key|[A-Za-z0-9+/=_-]{161}", re.IGNORECASE)


def scrub(text: str) -> str:
    """The text without data URLs, credentials, long encoded words, and queries and fragments of URLs.

    Our own lines hold none of these. Messages that quote others may: a library's exception names the URL that
    it was given, or the string that it could not read.
    """
    if len(text) > MOST_CHARACTERS:
        left_out = len(text) - MOST_CHARACTERS
        tail = text[_HEAD_CHARACTERS - MOST_CHARACTERS :]
        text = f"{text[:_HEAD_CHARACTERS]}… ({left_out} characters left out) …{tail}"
    if not _SUSPECT.search(text):
        return text
    text = _DATA_URL.sub("data:…", text)
    text = _URL.sub(r"\1\2", text)
    text = _KEY.sub(r"\1…", text)
    text = _CREDENTIALS.sub(r"\1 …", text)
    return _LONG.sub(lambda match: f"…({len(match[0])} characters)", text)


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``level`` is of Tessera's own lines; other libraries are heard from WARNING up."""

    format: Annotated[LogFormat, Setting(flag="--log-format", help="lines for people or programs")] = (
        LogFormat.TEXT
    )
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Setting(flag="--log-level", help="of what is logged, and above"),
    ] = "info"


def add_log_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser.add_argument_group("log"), LogSettings)


def log_settings(argv: Sequence[str] | None = None) -> LogSettings:
    """What a command line says of the log, before the rest of it is read: its errors are logged, too.

    A value that is wrong is left for the whole command line's parser to refuse.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    add_log_arguments(parser)
    try:
        parsed, _ = parser.parse_known_args(argv)
    except argparse.ArgumentError:
        return LogSettings()
    return read_flags(LogSettings, parsed)


# The names that Dynamo's runtime uses in its own JSON lines.
_LEVEL_NAMES: Final = {"WARNING": "WARN"}

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
            "level": _LEVEL_NAMES.get(record.levelname, record.levelname),
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


_log = logging.getLogger("tessera")


def log_as(role: str, settings: LogSettings | None = None) -> None:
    """Log to stderr under this role; a later call changes the role and the settings.

    Uncaught exceptions and Python's warnings become lines as well, so that nothing else writes there.
    """
    settings = settings or LogSettings()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(role) if settings.format is LogFormat.JSON else TextFormatter(role))
    # Libraries tell at INFO which URLs they ask, with all that stands in them.
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    _log.setLevel(settings.level.upper())
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    _log.critical("uncaught %s", kind.__name__, exc_info=(kind, error, trace))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None:
        name = args.thread.name if args.thread is not None else "a thread"
        _log.critical(
            "uncaught %s in %s",
            args.exc_type.__name__,
            name,
            exc_info=(args.exc_type, args.exc_value, args.exc_traceback),
        )
