"""``python -m tessera.launch.ready``: ask each ``/health`` until all are ready, or cannot become so."""

from __future__ import annotations

import argparse
import http.client
import json
import logging
import os
import signal
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.logs import add_log_arguments, log_as, log_settings

log = logging.getLogger("tessera.frontend.ready")

_INTERVAL_SECONDS: Final = 0.1


def _trusting() -> ssl.SSLContext:
    """For the own frontends, whose certificate is for the name that clients know, not for this address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


# A proxy from the environment would be asked for an address on this host.
_opener = urllib.request.build_opener(
    urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=_trusting())
)


def workers(url: str) -> dict[str, int] | None:
    """The numbers of workers, and of the ``frontends`` that know so many; None when nothing answers yet."""
    request = urllib.request.Request(f"{url}/health")
    try:
        try:
            with _opener.open(request, timeout=2.0) as answer:
                body = json.load(answer)
        except urllib.error.HTTPError as error:
            body = json.load(error)
    except (OSError, ValueError, http.client.HTTPException):
        return None
    found = body.get("workers") if isinstance(body, dict) else None
    return {**found, "frontends": body.get("frontends", 1)} if isinstance(found, dict) else None


def _serves(url: str) -> bool:
    """Whether a worker serves; its answers are 503 until then."""
    try:
        with _opener.open(f"{url}/health", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a service is ready with: ``embed`` and ``encode`` workers known to each of ``frontends``.

    ``workers`` are asked themselves, on a host without a frontend. Both are URLs; ``together`` is how many
    frontends answer behind each.
    """

    frontends: Sequence[str]
    workers: Sequence[str]
    embed: int
    encode: int
    together: int = 1

    def _is_there(self) -> bool:
        return all(self._knows_all(url) for url in self.frontends) and all(map(_serves, self.workers))

    def _knows_all(self, url: str) -> bool:
        found = workers(url)
        return (
            found is not None
            and found.get("embed", 0) >= self.embed
            and found.get("encode", 0) >= self.encode
            and found["frontends"] >= self.together
        )

    def wait(self, timeout: float, hopeless: Callable[[], bool] = lambda: False) -> bool:
        """Ask until all are ready, for ``timeout`` seconds at most or until there is no hope.

        Logs what is missing in the end.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._is_there():
                return True
            if hopeless():
                return False
            time.sleep(_INTERVAL_SECONDS)
        found = [workers(url) for url in self.frontends] + [_serves(url) for url in self.workers]
        log.error("not ready after %.0f s: %s", timeout, found)
        return False


class Asking:
    """Waits until a service is ready, on a thread; sends SIGCHLD to the process when ``done``."""

    def __init__(self, expected: Expected, timeout: float) -> None:
        self.done = threading.Event()
        self.hopeless = threading.Event()
        self.ready = False
        threading.Thread(target=self._ask, args=(expected, timeout), daemon=True).start()

    def _ask(self, expected: Expected, timeout: float) -> None:
        try:
            self.ready = expected.wait(timeout, self.hopeless.is_set)
        finally:
            self.done.set()
            os.kill(os.getpid(), signal.SIGCHLD)


def say_ended(pid: int) -> None:
    log.error("process %d ended before the service was ready", pid)


def _has_ended(pid: int) -> bool:
    """Whether the process is gone or a zombie that nobody has waited for yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tessera.launch.ready", description=__doc__)
    parser.add_argument("--url", nargs="*", default=[], help="frontends")
    parser.add_argument(
        "--worker", nargs="*", default=[], help="URLs of workers on a host without a frontend"
    )
    parser.add_argument("--embed", type=int, default=1, help="embed or aggregated workers to wait for")
    parser.add_argument("--encode", type=int, default=0, help="encode workers to wait for")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    parser.add_argument("--pids", type=int, nargs="*", default=[], help="give up when one of these has ended")
    add_log_arguments(parser)
    parsed = parser.parse_args(argv)
    log_as("launch", log_settings(argv))
    expected = Expected(frontends=parsed.url, workers=parsed.worker, embed=parsed.embed, encode=parsed.encode)

    def one_has_ended() -> bool:
        for pid in parsed.pids:
            if _has_ended(pid):
                say_ended(pid)
                return True
        return False

    return 0 if expected.wait(parsed.timeout, one_has_ended) else 1


if __name__ == "__main__":
    sys.exit(main())
