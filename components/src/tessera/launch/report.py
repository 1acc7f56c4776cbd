"""What the launcher says on stderr: text for people, or one JSON object a line."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from tessera.terminal import printable


class Report:
    """``say``, ``warn`` and ``complain`` write one line at INFO, WARN and ERROR."""

    def __init__(self, log_format: str) -> None:
        self._json = log_format == "json"

    def say(self, message: str) -> None:
        self._line("INFO", message)

    def warn(self, message: str) -> None:
        self._line("WARN", message)

    def complain(self, message: str) -> None:
        self._line("ERROR", message)

    def show(self, text: str) -> None:
        """Write text, of which a terminal obeys nothing but the ends of lines."""
        # Whoever read it may have gone, and a terminal may be closed; the children go on.
        with suppress(OSError):
            sys.stderr.write(printable(text, keep="\n"))
            sys.stderr.flush()

    def _line(self, level: str, message: str) -> None:
        if not self._json:
            self.show(f"tessera: {message}\n")
            return
        # Not tessera.logs: before the environment is made there is no orjson.
        import json
        from datetime import UTC, datetime

        line = {
            "time": datetime.now(UTC).isoformat(timespec="microseconds")[:-6] + "Z",
            "level": level,
            "target": "launch",
            "role": "launch",
            "pid": os.getpid(),
            "message": "tessera: " + "".join(" " if ord(c) < 32 or ord(c) == 127 else c for c in message),
        }
        self.show(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")
