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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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


def _health(url: str) -> dict[str, Any]:
    """What a frontend says of itself; nothing when it does not answer yet."""
    request = urllib.request.Request(f"{url}/health")
    try:
        try:
            with _opener.open(request, timeout=2.0) as answer:
                body = json.load(answer)
        except urllib.error.HTTPError as error:
            body = json.load(error)
    except (OSError, ValueError, http.client.HTTPException):
        return {}
    return body if isinstance(body, dict) else {}


def workers(url: str, model: str = "") -> dict[str, int] | None:
    """The numbers of workers, and of the ``frontends`` that know so many; None when nothing answers yet.

    Those of one of several models where it is named.
    """
    body = _health(url)
    found = (_models(body).get(model, {}) if model else body).get("workers")
    return {**found, "frontends": body.get("frontends", 1)} if isinstance(found, dict) else None


def _models(body: Mapping[str, Any]) -> dict[str, Any]:
    found = body.get("models")
    return found if isinstance(found, dict) else {}


def _serves(url: str) -> bool:
    """Whether a worker serves; its answers are 503 until then."""
    try:
        with _opener.open(f"{url}/health", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a service is ready with: workers known to each of ``frontends``.

    ``models`` has the numbers of embed and encode workers of each of several models, or those of all workers
    by "". ``workers`` are asked themselves, on a host without a frontend. Both are URLs; ``together`` is how
    many frontends answer behind each.
    """

    frontends: Sequence[str]
    models: Mapping[str, tuple[int, int]]
    workers: Sequence[str] = ()
    together: int = 1

    def _is_there(self) -> bool:
        known = (
            self._knows(url, name, *counts) for url in self.frontends for name, counts in self.models.items()
        )
        return all(known) and all(map(_serves, self.workers))

    def _knows(self, url: str, model: str, embed: int, encode: int) -> bool:
        found = workers(url, model)
        return (
            found is not None
            and found.get("embed", 0) >= embed
            and found.get("encode", 0) >= encode
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
        known = [{**_models(body)} or body.get("workers") for body in map(_health, self.frontends)]
        found = [*known, *(_serves(url) for url in self.workers)]
        log.error("not ready after %.0f s: %s", timeout, found)
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """That no frontend has work for these models any more; ``together`` frontends answer behind each URL.

    ``models`` has the status that says so, empty for one that is not to be named any more.
    """

    frontends: Sequence[str]
    models: Mapping[str, str]
    together: int = 1

    def wait(self, timeout: float, hopeless: Callable[[], bool]) -> bool:
        """Ask until it is so, as ``Expected.wait`` does."""
        deadline, left = time.monotonic() + timeout, self._answers
        while left and time.monotonic() < deadline and not hopeless():
            time.sleep(_INTERVAL_SECONDS)
            # Any of them may answer.
            left = left - 1 if self._is_so() else self._answers
        return not left

    @property
    def _answers(self) -> int:
        return 1 if self.together == 1 else 4 * self.together

    def _is_so(self) -> bool:
        found = [_models(body) for body in map(_health, self.frontends) if body]
        return all(
            models.get(name, {}).get("status", "") == status
            for models in found
            for name, status in self.models.items()
        )


class Asking:
    """Waits until a service is as ``expected``, on a thread; sends SIGCHLD to the process when ``done``."""

    def __init__(self, expected: Expected | Gone, timeout: float) -> None:
        self.done = threading.Event()
        self.hopeless = threading.Event()
        self.ready = False
        threading.Thread(target=self._ask, args=(expected, timeout), daemon=True).start()

    def _ask(self, expected: Expected | Gone, timeout: float) -> None:
        try:
            self.ready = expected.wait(timeout, self.hopeless.is_set)
        finally:
            self.done.set()
            os.kill(os.getpid(), signal.SIGCHLD)


def say_ended(ended: str) -> None:
    log.error("%s before the service was ready", ended)


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
        "--workers",
        nargs=3,
        action="append",
        default=[],
        metavar=("MODEL", "EMBED", "ENCODE"),
        help="embed or aggregated workers, and encode workers, to wait for: of a model, or of all with ''",
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    parser.add_argument("--pids", type=int, nargs="*", default=[], help="give up when one of these has ended")
    add_log_arguments(parser)
    parsed = parser.parse_args(argv)
    log_as("launch", log_settings(argv))
    try:
        models = {model: (int(embed), int(encode)) for model, embed, encode in parsed.workers}
    except ValueError:
        parser.error("--workers takes a model and two whole numbers")
    expected = Expected(frontends=parsed.url, models=models or {"": (1, 0)})

    def one_has_ended() -> bool:
        for pid in parsed.pids:
            if _has_ended(pid):
                say_ended(pid)
                return True
        return False

    return 0 if expected.wait(parsed.timeout, one_has_ended) else 1


if __name__ == "__main__":
    sys.exit(main())
