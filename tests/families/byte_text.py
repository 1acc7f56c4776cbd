"""Text for the test families without tokenizer files: bytes are tokens, and 256 stands for a vision row."""

from __future__ import annotations

import numpy as np

from tessera.errors import InvalidInput
from tessera.models.base import Content, ImagePlan, Int32Array, Piece, Prompt, Role, Truncate

VOCABULARY, PLACEHOLDER = 257, 256


class ByteText:
    """The text side of ``tessera.models.base.Model`` without tokenizer files."""

    max_tokens = 512
    vocab_size = VOCABULARY
    dimensions: frozenset[int] = frozenset()

    def prompt(self, content: Content, *, max_tokens: int, truncate: Truncate, param: str) -> Prompt:
        tokens: list[int] = []
        for part in content.parts:
            if isinstance(part, ImagePlan):
                tokens += [PLACEHOLDER] * part.rows
            else:
                tokens += part.encode() if isinstance(part, str) else part.tolist()
        if not tokens or len(tokens) > max_tokens:
            raise InvalidInput(f"{param}: {len(tokens)} tokens", param=param)
        image_tokens = sum(image.rows for image in content.images)
        return Prompt(tokens=np.array(tokens, np.int32), image_tokens=image_tokens)

    def pieces(self, text: str, *, role: Role, instruction: str | None = None, param: str) -> list[Piece]:
        return [Piece(token=value, text=chr(value), start=0, stop=0) for value in text.encode()]

    def token_text(self, token: int) -> str:
        return chr(token)

    def vision_index(self, tokens: Int32Array) -> Int32Array:
        return np.flatnonzero(tokens == PLACEHOLDER).astype(np.int32)
