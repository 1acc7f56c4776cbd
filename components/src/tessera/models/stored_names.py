"""From the names in weight files to canonical ones, as far as families agree."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_UNUSED: Final = re.compile(r"((.*\.)?(lm_head\..*|rotary_emb\.inv_freq|position_ids)|vision\.head\..*)$")
_OUTER: Final = "model."


def part_name(name: str, prefixes: Sequence[tuple[str, str]]) -> str | None:
    """The canonical name of a stored tensor; None for one that no forward pass uses.

    ``prefixes`` are what files put before the names of a part, with or without ``model.`` before that, each
    with the canonical prefix; the first that fits counts. A name that has none comes back as it is, and then
    matches nothing that is expected. Unused are a head that generates text, an encoder's own pooling, and
    tables that are computed.
    """
    bare = name.removeprefix(_OUTER)
    names = (part + bare.removeprefix(stem) for stem, part in prefixes if bare.startswith(stem))
    canonical = next(names, name)
    return None if _UNUSED.match(canonical) else canonical
