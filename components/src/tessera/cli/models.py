"""``tessera models``: the families that this installation serves, or what a running service does."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from tessera.command import OneLineParser
from tessera.terminal import complain, no_answer, say

_SECONDS: Final = 10.0


class NoAnswer(Exception):
    """A service that cannot be asked, and why."""


def main(arguments: Sequence[str] | None = None, prog: str = "tessera models") -> int:
    """Print a line for each model; 1 and one line on standard error when a service gives no answer."""
    parser = OneLineParser(
        prog=prog,
        description="Says which models can be served here, by names for tessera serve: published ones, and "
        "others whose config.json has such a model_type. With --url, what a running service serves.",
    )
    parser.add_argument(
        "--url",
        nargs="?",
        const=os.environ.get("TESSERA_URL", "http://127.0.0.1:8000"),
        help="of a running service (TESSERA_URL, else http://127.0.0.1:8000); TESSERA_API_KEY is sent to it",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    try:
        here = options.url is None
        found = _installed() if here else _served(options.url.rstrip("/"))
    except NoAnswer as error:
        complain(f"{prog}: {error}")
        return 1
    if options.json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return 0
    for model in _by_model(found) if here else found:
        name, *rest = model.items()
        say(f"{name[1]}: {', '.join(f'{key} {_shown(value)}' for key, value in rest)}")
    return 0


def _installed() -> list[dict[str, Any]]:
    # Here: with the libraries of models it takes a quarter of a second.
    from tessera.models import architectures_of, families, hub_models_of

    return [
        {
            "family": family.name,
            "models": list(hub_models_of(family)),
            "model_type": list(family.model_types),
        }
        | ({"architectures": list(named)} if (named := architectures_of(family)) else {})
        for family in families()
    ]


def _by_model(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The families with each of their models before them, for a line each."""
    return [
        ({"model": name} if name else {}) | {key: value for key, value in family.items() if key != "models"}
        for family in found
        for name in family["models"] or [""]
    ]


def _served(url: str) -> list[dict[str, Any]]:
    """The models that a service lists; raises ``NoAnswer``."""
    key = os.environ.get("TESSERA_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(f"{url}/v1/models", headers=headers)
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            data = json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise NoAnswer(f"{url} asks for an API key: set TESSERA_API_KEY to one that it knows") from error
        raise NoAnswer(f"{url} answered {error.code}") from error
    except (OSError, http.client.HTTPException) as error:
        hint = f": its port speaks TLS, ask https://{url.partition('://')[2]}" if _speaks_tls(url) else ""
        raise NoAnswer(no_answer(url, error) + hint) from error
    except (ValueError, LookupError, TypeError) as error:
        raise NoAnswer(f"{url} does not answer as Tessera does") from error
    left_out = ("object", "created", "owned_by")
    return [{key: value for key, value in model.items() if key not in left_out} for model in data]


def _speaks_tls(url: str) -> bool:
    """Whether what is asked without TLS answers with it; no certificate is looked at, and nothing is sent."""
    try:
        asked = urlsplit(url)
        if asked.scheme != "http" or asked.hostname is None:
            return False
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with (
            socket.create_connection((asked.hostname, asked.port or 80), timeout=_SECONDS) as connection,
            context.wrap_socket(connection, server_hostname=asked.hostname),
        ):
            return True
    except (OSError, ValueError):
        return False


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return value if isinstance(value, str) else json.dumps(value)
