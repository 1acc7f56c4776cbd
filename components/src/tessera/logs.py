"""How every process of a deployment logs: to stderr, as text or as JSON, one line for a request.

A process begins a request's line when the request arrives, and writes it when the answer is sent. Code in
between adds fields to it (``note``, ``count``). Other lines that are logged meanwhile carry the request's id.

A process that serves requests writes behind (``write_behind``): the call that logs only keeps the record, and
a thread makes lines of many records at a time.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import re
import select
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from types import TracebackType
from typing import Annotated, Final, TextIO

import msgspec
import orjson

from tessera.errors import ConfigError
from tessera.flags import add_flags, read_flags, take_variables
from tessera.settings import LogLevel, Setting

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


@dataclass(slots=True, eq=False)
class serving:
    """``with serving(line)``: that request is served inside."""

    line: RequestLine
    _token: Token[RequestLine | None] = field(init=False)

    def __enter__(self) -> None:
        self._token = _current.set(self.line)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


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
# Short texts without any of these match nothing: ids, routes, names.
_HARMLESS = re.compile(r"[^\s:=]*")
_SHORT: Final = 160


def scrub(text: str) -> str:
    """The text without data URLs, credentials, long encoded words, and queries and fragments of URLs.

    Our own lines hold none of these. Messages that quote others may: a library's exception names the URL that
    it was given, or the string that it could not read.
    """
    if len(text) <= _SHORT:
        return text if text.isalnum() or _HARMLESS.fullmatch(text) else _scrubbed(text)
    return _scrub(text)


def _scrub(text: str) -> str:
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


# Of short texts that are neither an id nor a number, few are written again and again: messages, addresses.
_scrubbed = lru_cache(maxsize=256)(_scrub)


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``level`` is of Tessera's own lines; other libraries are heard from WARNING up."""

    format: Annotated[LogFormat, Setting(flag="--log-format", help="lines for people or programs")] = (
        LogFormat.TEXT
    )
    level: LogLevel = "info"


def add_log_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, LogSettings, parser.add_argument_group("log"))


def log_settings(argv: Sequence[str] | None = None) -> LogSettings:
    """What a command line says of the log, before the rest of it is read: its errors are logged, too.

    A value that is wrong is left for the whole command line's parser to refuse.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    add_log_arguments(parser)
    try:
        take_variables(parser, LogSettings)
        parsed, _ = parser.parse_known_args(argv)
    except (argparse.ArgumentError, ConfigError):
        return LogSettings()
    return read_flags(LogSettings, parsed)


def is_sampled(request_id: str, share: float) -> bool:
    """Say by a request's id, so that all processes agree, whether it is of the ``share`` that is logged."""
    return share >= 1.0 or zlib.crc32(request_id.encode(errors="replace")) < share * (1 << 32)


# The names that Dynamo's runtime uses in its own JSON lines.
_LEVEL_NAMES: Final = {"WARNING": "WARN"}

# Whatever could end a line, or move a terminal's cursor.
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_UNSEEN = re.compile(r"[\x7f-\x9f\u2028\u2029]")
_BARE = re.compile(r"[!#-~]+")


def fields_of(record: logging.LogRecord) -> dict[str, Value]:
    """The request's id and what the line says beside its message."""
    return {
        name: scrub(value) if isinstance(value, str) else value
        for name, value in _own_fields(record).items()
        if value is not None
    }


def _own_fields(record: logging.LogRecord) -> Mapping[str, Value]:
    own: Mapping[str, Value] = getattr(record, "fields", _NO_FIELDS)
    if "request_id" not in own and (line := current_line()) is not None:
        return {"request_id": line.request_id, **own}
    return own


_NO_FIELDS: Final[Mapping[str, Value]] = {}


class TextFormatter(logging.Formatter):
    """For people: ``time role[process] LEVEL name: message name=value…``.

    What follows a line break is indented, so that nobody's text can pass for a line of its own.
    """

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role
        self._second = -1
        self._clock = ""

    def format(self, record: logging.LogRecord) -> str:
        second = int(record.created)
        if second != self._second:
            self._clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
            self._second = second
        text = f"{record.name}: {record.getMessage()}"
        if record.exc_info or record.exc_text or record.stack_info or len(text) > _SHORT:
            head, *rest = _lines_with_trace(text, record)
        else:
            head, *rest = _lines_of(text)
        began = f"{self._clock},{int(record.created % 1 * 1e3):03d} {self._role}[{os.getpid()}]"
        parts = [began, record.levelname, head]
        for name, value in _own_fields(record).items():
            if isinstance(value, str):
                parts.append(f"{name}={_plain(value)}")
            elif value is not None:
                parts.append(f"{name}={value}")
        line = " ".join(parts)
        return "\n  ".join([line, *rest]) if rest else line


def _lines_with_trace(text: str, record: logging.LogRecord) -> Sequence[str]:
    for below in (exception_of(record), record.stack_info):
        if below:
            text += below if text.endswith("\n") else f"\n{below}"
    return _lines(text)


class JsonFormatter(logging.Formatter):
    """For machines: one object a line, with Dynamo's names for what its lines say, too."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role
        self._second = -1
        self._clock = ""

    def format(self, record: logging.LogRecord) -> str:
        second, microseconds = divmod(round(record.created * 1e6), 1_000_000)
        if second != self._second:
            self._clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
            self._second = second
        line: dict[str, Value] = {
            "time": f"{self._clock}.{microseconds:06d}Z",
            "level": _LEVEL_NAMES.get(record.levelname, record.levelname),
            "target": record.name,
            "role": self._role,
            "pid": os.getpid(),
            "message": scrub(record.getMessage()),
        }
        line |= fields_of(record)
        if exception := exception_of(record):
            line["exception"] = scrub(exception)
        return _json(line)


def exception_of(record: logging.LogRecord) -> str | None:
    """The traceback of what the record is about."""
    if record.exc_info and not record.exc_text:
        return _tracebacks.formatException(record.exc_info)
    return record.exc_text


_tracebacks: Final = logging.Formatter()


def _lines(text: str) -> Sequence[str]:
    return _CONTROL.sub(_escaped, _scrub(text)).split("\n")


_lines_of = lru_cache(maxsize=256)(_lines)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def _plain(text: str) -> str:
    if len(text) > _SHORT:
        return _quoted(text)
    # An id is never written again, in contrast to addresses and routes.
    return text if text.isalnum() and text.isascii() else _quoted_short(text)


def _quoted(text: str) -> str:
    text = scrub(text)
    return text if _BARE.fullmatch(text) else _json(text)


_quoted_short = lru_cache(maxsize=256)(_quoted)


def _json(value: str | dict[str, Value]) -> str:
    try:
        encoded = orjson.dumps(value, default=str)
    except TypeError:
        encoded = orjson.dumps(_encodable(value), default=str)
    text = encoded.decode()
    if text.isascii() and "\x7f" not in text:
        return text
    # JSON lets these stand in a string as they are; many readers take them for the line's end.
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _encodable(value: str | dict[str, Value]) -> Value | dict[str, Value]:
    """Without lone surrogates, which cannot be written as JSON."""
    if isinstance(value, dict):
        return {name: _text(entry) for name, entry in value.items()}
    return _text(value)


def _text(value: Value) -> Value:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


class Line(logging.LogRecord):
    """A record with these fields about a request, ``request_id`` among them.

    ``Logger.log`` takes 5 µs where this takes 2: it finds out the place in the source, the thread and the
    task, which no line of ours says.
    """

    # The constructor that it replaces is what costs.
    def __init__(
        self,
        log: logging.Logger,
        level: int,
        message: str,
        fields: Mapping[str, Value],
        *,
        created: float,
        error: BaseException | None = None,
    ) -> None:
        self.__dict__ = {
            **_UNKNOWN,
            "name": log.name,
            "msg": message,
            "levelname": logging.getLevelName(level),
            "levelno": level,
            "created": created,
            "msecs": created % 1 * 1e3,
            "fields": fields,
            "exc_info": None if error is None else (type(error), error, error.__traceback__),
        }


_UNKNOWN: Final = logging.makeLogRecord({}).__dict__


# What waits to be written. At 2,000 requests a second, five seconds of a reader that has stopped reading.
_MOST_WAITING: Final = 10_000
# How long a line waits for others.
_LINGER_SECONDS: Final = 0.02
# How long the end of a process waits for a reader that does not read.
_PATIENCE_SECONDS: Final = 5.0
# An error waits so long for lines that are being written; once, where the stream takes nothing.
_ERROR_SECONDS: Final = 0.25
# What can stand in a message's arguments and does not change later.
_FIXED: Final = frozenset((str, int, float, bool, type(None)))


class LineHandler(logging.Handler):
    """Writes each record as a line, in the order in which they were logged.

    At first within the call that logs. After ``write_behind`` that call only keeps the record, as it is then,
    and a thread formats and writes what has come within 20 ms; from ``ERROR`` up a record is still written,
    with those before it, before the call returns, unless the stream takes nothing. The writer shares
    its stream with other processes, so no write is larger than a pipe takes whole.

    When the stream takes nothing, 10,000 records wait; later ones are left out, and a line says how many
    once it takes some again: a service does not stop because nobody reads its log.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._left_out = 0
        self._reset()

    def _reset(self) -> None:
        self._waiting: deque[logging.LogRecord] = deque()
        # Held while lines are formatted and written. Whoever does may log.
        self._writing = threading.RLock()
        self._behind = False
        self._called = False
        # The thread has been writing for longer than an error waits.
        self._stuck = False
        self._call = threading.Event()

    def write_behind(self) -> None:
        """Begin the thread; call it when signals no longer end the process at once."""
        if not self._behind:
            self._behind = True
            threading.Thread(target=self._run, name="log", daemon=True).start()

    def after_fork(self) -> None:
        """Begin anew in a child, which has neither the thread nor a claim to what was logged before."""
        self._reset()

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._waiting) >= _MOST_WAITING:
            self._left_out += 1
            return
        try:
            # A request's own line is as it will be written.
            is_line = isinstance(record, Line) and not record.exc_info
            self._waiting.append(record if is_line else _fixed(record))
        except Exception:
            self.handleError(record)
        if not self._behind:
            self.flush()
        elif record.levelno >= logging.ERROR and self._flush(0.0 if self._stuck else _ERROR_SECONDS):
            pass
        elif not self._called:
            self._called = True
            self._call.set()

    def flush(self) -> None:
        """Write all that waits; gives up after 5 s of a stream that takes nothing."""
        self._flush(_PATIENCE_SECONDS)

    def close(self) -> None:
        self.flush()
        self._behind = False
        self._call.set()
        super().close()

    def _run(self) -> None:
        while self._behind:
            self._call.wait()
            self._call.clear()
            time.sleep(_LINGER_SECONDS)
            # From here on another record calls again.
            self._called = False
            with self._writing:
                self._write()

    def _flush(self, timeout: float) -> bool:
        """Write all that waits, unless another thread is writing for longer than that."""
        if not self._writing.acquire(timeout=timeout):
            self._stuck = True
            return False
        try:
            self._write()
        finally:
            self._writing.release()
        return True

    def _write(self) -> None:
        lines: list[str] = []
        size = 0
        while self._waiting:
            record = self._waiting.popleft()
            try:
                line = self.format(record) + "\n"
            except Exception:
                self.handleError(record)
                continue
            nbytes = len(line) if line.isascii() else len(line.encode(errors="replace"))
            if lines and size + nbytes > select.PIPE_BUF:
                self._put(lines)
                lines, size = [], 0
            lines.append(line)
            size += nbytes
        if lines:
            self._put(lines)
        self._stuck = False

    def _put(self, lines: Sequence[str]) -> None:
        try:
            self._stream.write("".join(lines))
            self._stream.flush()
        except (OSError, ValueError):
            # The reader is gone, or the stream is closed.
            self._left_out += len(lines)
            return
        if left_out := self._left_out:
            self._left_out = 0
            words = f"{left_out} lines were left out: standard error did not take them"
            self._put([self.format(Line(_log, logging.WARNING, words, {}, created=time.time())) + "\n"])


def _fixed(record: logging.LogRecord) -> logging.LogRecord:
    """The record with all that its line will say, whatever changes after this."""
    # Other handlers get the same record.
    record = copy.copy(record)
    given = () if record.args is None else record.args
    if type(record.msg) is not str or type(given) is not tuple or not _FIXED.issuperset(map(type, given)):
        record.msg, record.args = record.getMessage(), None
    if record.exc_info:
        # It would keep alive whatever the failed call had in hand.
        record.exc_text, record.exc_info = exception_of(record), None
    own: Mapping[str, Value] = getattr(record, "fields", _NO_FIELDS)
    if "request_id" not in own:
        line = current_line()
        # Also where there is none: the formatter may run within another request.
        own = {"request_id": None if line is None else line.request_id, **own}
    vars(record)["fields"] = own
    return record


_log = logging.getLogger("tessera")

_handler: LineHandler | None = None


def write_behind() -> None:
    """Leave formatting and writing to a thread, for as long as the process serves requests.

    ``logging.shutdown``, which is called at the interpreter's exit and by ``process_exit.leave``, writes what
    waits. What ends a process from outside (SIGKILL, a crash in native code) takes up to 20 ms of lines below
    ``ERROR`` with it.
    """
    if _handler is not None:
        _handler.write_behind()


def _after_fork() -> None:
    if _handler is not None:
        _handler.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def log_as(role: str, settings: LogSettings | None = None) -> None:
    """Log to stderr under this role; a later call changes the role and the settings.

    Uncaught exceptions and Python's warnings become lines as well, so that nothing else writes there.
    """
    global _handler
    settings = settings or LogSettings()
    _handler = handler = LineHandler(sys.stderr)
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
    # The end of a thread by SystemExit is none of an error, as for Python itself.
    if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
        name = args.thread.name if args.thread is not None else "a thread"
        _log.critical(
            "uncaught %s in %s",
            args.exc_type.__name__,
            name,
            exc_info=(args.exc_type, args.exc_value, args.exc_traceback),
        )
