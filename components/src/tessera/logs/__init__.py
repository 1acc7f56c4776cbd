"""How every process of a deployment logs: to stderr, as text for people or as JSON, one line for a request.

A request's line is begun where the process hears of it and written where the process is done with it. In
between, whoever does the work may note on it what is worth knowing; whatever else is logged meanwhile
carries the request's id.
"""

from tessera.logs.request_line import RequestLine, count, current_line, note, serving
from tessera.logs.settings import LogFormat, LogSettings, add_log_arguments, log_settings
from tessera.logs.setup import log_as

__all__ = [
    "LogFormat",
    "LogSettings",
    "RequestLine",
    "add_log_arguments",
    "count",
    "current_line",
    "log_as",
    "log_settings",
    "note",
    "serving",
]
