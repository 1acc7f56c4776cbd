"""Makes a process log."""

from __future__ import annotations

import logging
import sys
import threading
from types import TracebackType

from tessera.logs.formatters import JsonFormatter, TextFormatter
from tessera.logs.settings import LogFormat, LogSettings

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
