"""How a model is named in requests, and in the name of the place where its workers are.

Nothing but the standard library is imported: the launcher names models, too.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

_NAMESPACE_CHARACTERS: Final = 40
# A client's text of 55 MB took the event loop 0.4 s.
_MOST_CHARACTERS: Final = 1024


def find_name(asked: str, names: Collection[str]) -> str | None:
    """The one of ``names`` that a client means, None if there is none.

    Case, and ``.`` or ``_``, make no difference: NVIDIA's own names differ in them between paths, bodies and
    clients. A name that is written exactly so goes first, and one of more than 1024 characters is none.
    """
    if len(asked) > _MOST_CHARACTERS:
        return None
    if asked in names:
        return asked
    folded = fold_name(asked)
    return next((name for name in names if fold_name(name) == folded), None)


def fold_name(name: str) -> str:
    """The same for all names that mean one model."""
    return name.casefold().replace("_", ".")


def namespace_of(namespace: str, name: str) -> str:
    """Where the workers of one of several models are: the same on every host, by the model's first name."""
    words = re.sub(r"[^a-z0-9]+", "-", fold_name(name)).strip("-")
    return f"{namespace}-{words[:_NAMESPACE_CHARACTERS].rstrip('-')}"
