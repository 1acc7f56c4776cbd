"""What clients of an environment of their own are asked, and how a script of theirs gives the answers back.

Such a script is run by ``tests.clients.environment.answers_of`` and finds nothing but the standard library
and its clients.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# Nothing is asked of any other host.
os.environ |= {
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NVIDIA_TELEMETRY_ENABLED": "0",
}


class Asked(NamedTuple):
    """``texts`` are unlike each other, so that one is found by its text."""

    url: str
    key: str
    model: str
    query: str
    texts: list[str]


def answer(clients: Mapping[str, Callable[[Asked], Any]]) -> None:
    """Ask every client what the arguments say, and print what each answers, or the text of its error.

    The clients print what they like; the last line is ours.
    """
    url, key, model, query, texts = sys.argv[1:]
    asked = Asked(url, key, model, query, json.loads(texts))
    found: dict[str, Any] = {}
    for name, ask in clients.items():
        try:
            found[name] = ask(asked)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    print(f"\n{json.dumps(found)}")
