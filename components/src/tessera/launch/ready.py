"""``python -m tessera.frontend.ready``: ask each ``/health`` until all are ready, or cannot become so."""

from __future__ import annotations

import argparse
import http.client
import json
import logging
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from tessera.logs import add_log_arguments, log_as, log_settings

log = logging.getLogger("tessera.frontend.ready")


def workers(url: str) -> dict[str, int] | None:
    """The numbers of workers, or None when the frontend does not answer yet."""
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
    return found if isinstance(found, dict) else None


def _is_ready(url: str) -> bool:
    """Whether a worker serves; its answers are 503 until then."""
    try:
        with _opener.open(f"{url}/health", timeout=2.0) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


# A proxy from the environment would be asked for an address on this host.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ended(pid: int) -> bool:
    """Whether the process is gone or a zombie that nobody has waited for yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def _has(url: str, embed: int, encode: int) -> bool:
    found = workers(url)
    return found is not None and found.get("embed", 0) >= embed and found.get("encode", 0) >= encode


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tessera.frontend.ready", description=__doc__)
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
    deadline = time.monotonic() + parsed.timeout
    while time.monotonic() < deadline:
        frontends = all(_has(url, parsed.embed, parsed.encode) for url in parsed.url)
        if frontends and all(_is_ready(url) for url in parsed.worker):
            return 0
        for pid in parsed.pids:
            if ended(pid):
                log.error("process %d ended before the service was ready", pid)
                return 1
        time.sleep(0.1)
    found = [workers(url) for url in parsed.url] + [_is_ready(url) for url in parsed.worker]
    log.error("not ready after %.0f s: %s", parsed.timeout, found)
    return 1


if __name__ == "__main__":
    sys.exit(main())
