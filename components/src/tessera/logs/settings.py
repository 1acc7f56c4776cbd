"""What a process logs and in which form, from its command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """``level`` is of Tessera's own lines; other libraries are heard from WARNING up."""

    format: LogFormat = LogFormat.TEXT
    level: str = "info"


def add_log_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = LogSettings()
    group = parser.add_argument_group("log")
    group.add_argument(
        "--log-format", choices=tuple(LogFormat), default=defaults.format, help="lines for people or programs"
    )
    group.add_argument(
        "--log-level", choices=_LEVELS, default=defaults.level, help="of what is logged, and above"
    )


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
    return LogSettings(format=LogFormat(parsed.log_format), level=parsed.log_level)
