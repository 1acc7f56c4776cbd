"""From the names in weight files to canonical ones, as far as families agree."""

from __future__ import annotations

import re
from typing import Final

_UNUSED: Final = re.compile(r"(.*\.)?(lm_head\..*|rotary_emb\.inv_freq|position_ids)$")


def is_unused(name: str) -> bool:
    """A head that generates text, or a table that is computed."""
    return _UNUSED.match(name) is not None


def text_name(name: str) -> str | None:
    """``text.`` and the name inside the tower; files have it with ``model.`` before it, or bare.

    None for a tensor that no forward pass uses.
    """
    return None if is_unused(name) else f"text.{name.removeprefix('model.')}"
