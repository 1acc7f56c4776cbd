"""What a key learns of what another has sent: of the same input, first sent by the other key or by nobody.

Caches are on, and answer sooner what they have. ``cached_tokens`` of an answer says so in words.
"""

from __future__ import annotations

import base64
import http.client
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.floods import fresh, tile
from benchmarks.service import NAME

HEAD: Final = ("frontend", "input", "sent by nobody, ms", "by another key, ms", "of nobody's", "of another's")
"""Medians of the latencies, and of how many answers ``cached_tokens`` was more than 0."""
_PAIRS: Final = 40


@dataclass(slots=True)
class _Asked:
    seconds: list[float] = field(default_factory=list)
    cached: int = 0


def row(url: str, alice: str, bob: str, frontend: str, kind: str) -> tuple[str, ...]:
    """Ask with two keys, and return the row of one kind of input, ``text`` or ``picture``."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)

    def ask(key: str, value: Any) -> tuple[float, bool]:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        body = json.dumps({"model": NAME, "input": [value]})
        began = time.perf_counter()
        connection.request("POST", "/v1/embeddings", body, headers)
        with connection.getresponse() as answer:
            found = json.loads(answer.read())
        seconds = time.perf_counter() - began
        details = found["usage"].get("prompt_tokens_details") or {}
        return seconds, bool(details.get("cached_tokens"))

    asked = {False: _Asked(), True: _Asked()}
    for _ in range(_PAIRS):
        # In an order that does not matter.
        for sent in random.sample((False, True), 2):
            value = _MAKE[kind]()
            ask(alice, value if sent else _MAKE[kind]())
            seconds, cached = ask(bob, value)
            asked[sent].seconds.append(seconds)
            asked[sent].cached += cached
    connection.close()
    medians = (f"{1e3 * statistics.median(each.seconds):.2f}" for each in asked.values())
    return (frontend, kind, *medians, *(f"{each.cached} of {_PAIRS}" for each in asked.values()))


def _text() -> str:
    return " ".join(str(random.randrange(10**6)) for _ in range(200))


def _picture() -> list[dict[str, Any]]:
    data = base64.b64encode(fresh(tile())).decode()
    return [{"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}]


_MAKE: Final[dict[str, Callable[[], Any]]] = {"text": _text, "picture": _picture}
KINDS: Final = tuple(_MAKE)
"""Of input."""
