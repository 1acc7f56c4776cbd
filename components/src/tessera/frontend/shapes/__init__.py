"""Wire forms: each module translates one peer's way of writing an input into ``frontend.inputs`` types.

``embeddings`` decides which form a value has; the forms know nothing of each other, except that
messages are made of parts.
"""

from __future__ import annotations

from tessera.frontend.api.openai import parse_embeddings, read_json
from tessera.frontend.api.values import Json

__all__ = ["Json", "parse_embeddings", "read_json"]
