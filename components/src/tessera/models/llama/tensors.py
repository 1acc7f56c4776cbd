"""Tensors that files may hold beside the backbone's own, and that no forward pass uses."""

from __future__ import annotations

import re
from typing import Final

_UNUSED: Final = re.compile(r"(.*\.)?(lm_head\..*|rotary_emb\.inv_freq|position_ids)$")


def is_unused(name: str) -> bool:
    """A head that generates text, or a table that is computed."""
    return _UNUSED.match(name) is not None
