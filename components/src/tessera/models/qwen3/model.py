"""What checkpoints with a Qwen3 decoder have in common as models; importing and opening need no torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import ClassVar, Final

import msgspec

from tessera.checkpoint.fingerprint import fingerprint
from tessera.checkpoint.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, PlainTokenizer
from tessera.checkpoint.weights import Shapes
from tessera.dtypes import FLOATS
from tessera.models.assembly import Assembler, Segment
from tessera.models.base import Content, Output, OutputKind, Piece, Prompt, Role, Truncate
from tessera.models.prompts import prompt_of_ids, token_ids
from tessera.nn.spec import TextSpec

CONFIG_FILE: Final = "config.json"


class Qwen3Model:
    """Base of the families; thread-safe once opened.

    ``smallest`` is the narrowest vector that the checkpoint was trained to be cut to: every width from there
    on is one. ``revision`` names the family and is raised by hand whenever preprocessing, prompts or the
    forward pass change what they compute; ``files`` are fingerprinted beside the weights.
    """

    family: ClassVar[str]
    revision: ClassVar[str]
    files: ClassVar[tuple[str, ...]] = (CONFIG_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE)
    smallest: ClassVar[int]
    placeholder: int | None = None

    def __init__(
        self,
        path: Path,
        text: TextSpec,
        tokenizer: PlainTokenizer,
        options: msgspec.Struct,
        *,
        max_tokens: int,
    ) -> None:
        self.path = path
        self.text = text
        self.max_tokens = max_tokens
        self._tokenizer = tokenizer
        self._options = options

    @cached_property
    def fingerprint(self) -> str:
        """Computed at the first use, from files and options; raises ``CheckpointError`` without weights."""
        options = msgspec.json.encode(self._options).decode()
        return fingerprint(self.path, revision=f"{self.revision} {options}".encode(), files=self.files)

    @property
    def output(self) -> Output:
        return Output(kind=OutputKind.VECTOR, width=self.text.layer.hidden)

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size

    @cached_property
    def dimensions(self) -> frozenset[int]:
        return frozenset(range(self.smallest, self.text.layer.hidden))

    @cached_property
    def _assembler(self) -> Assembler:
        return Assembler(self._tokenizer, self.placeholder)

    def segments(self, content: Content, *, param: str) -> list[Segment]:
        """The prompt of texts and images; raises ``InvalidInput`` for what the family does not take."""
        raise NotImplementedError

    def prompt(self, content: Content, *, max_tokens: int, truncate: Truncate, param: str) -> Prompt:
        ids = token_ids(content, param=param)
        if ids is None:
            segments = self.segments(content, param=param)
            return self._assembler.prompt(segments, max_tokens=max_tokens, truncate=truncate, param=param)
        return prompt_of_ids(
            ids,
            vocab_size=self.vocab_size,
            placeholder=self.placeholder,
            max_tokens=max_tokens,
            truncate=truncate,
            param=param,
        )

    def pieces(self, text: str, *, role: Role, instruction: str | None = None, param: str) -> Sequence[Piece]:
        content = Content(parts=(text,), role=role, instruction=instruction)
        return self._assembler.pieces(self.segments(content, param=param), param=param)

    def token_text(self, token: int) -> str:
        return self._tokenizer.text_of(token)

    def text_nbytes(self, dtype: str) -> int:
        return nbytes(self.text.shapes(), dtype)

    def text_activation_nbytes(self, dtype: str, tokens: int) -> int:
        return self.text.activations(tokens) * FLOATS[dtype].itemsize


def nbytes(shapes: Shapes, dtype: str) -> int:
    """Bytes of tensors of these shapes."""
    return sum(map(prod, shapes.values())) * FLOATS[dtype].itemsize
