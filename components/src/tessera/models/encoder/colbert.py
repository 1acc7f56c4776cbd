"""ColBERT: a vector of each token, of queries that are expanded and of documents without punctuation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Final

import numpy as np

from tessera.checkpoint.declared import STANFORD, read_declared
from tessera.checkpoint.late_interaction import Side, read_late_interaction
from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.checkpoint.tokenizer import token_name
from tessera.errors import CheckpointError
from tessera.models.base import (
    Content,
    ImagePlan,
    Int32Array,
    Output,
    OutputKind,
    Piece,
    Prompt,
    Role,
    Skiplist,
    Truncate,
)
from tessera.models.encoder.body import body_of
from tessera.models.encoder.config import read_encoder
from tessera.models.encoder.model import ColbertOptions, EncoderModel
from tessera.models.prompts import Run, Segment
from tessera.nn.spec import HeadSpec

STANFORD_HEAD: Final = {"linear.": "head."}
"""The projection in Stanford's files, by its name in the tower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """``marker`` is the token behind the first one, None for none; ``name`` is its text, ``prompt`` follows.

    ``length`` is the most tokens of an input, and ``begins`` has those that every input begins with.
    """

    marker: int | None
    name: str
    prompt: str
    length: int
    begins: tuple[int, ...]


class ColbertModel(EncoderModel):
    """Base of ColBERT models, as PyLate 1.6 and ``MultiVectorEncoder`` of sentence-transformers 6.2 run them.

    An input without a role is a document. Which side an input is on can be told from its tokens: workers are
    sent no more than these. ``mask`` and ``unknown`` are tokens where ``tokenizer_config.json`` does not name
    them.
    """

    mask: ClassVar[str]
    unknown: ClassVar[str]
    kind = OutputKind.TOKENS
    projects_tokens = True
    # Markers of PyLate are added tokens that are not special.
    finds_words = False

    def __init__(self, path: Path, options: ColbertOptions) -> None:
        """Read configuration and tokenizer; the weights are not looked at. Raises ``CheckpointError``."""
        config, declared = Section.read(path / CONFIG_FILE), read_declared(path)
        if declared.task != "tokens":
            raise CheckpointError(
                f"{path}: declares no token vectors: {CONFIG_FILE} has no {STANFORD}, and modules.json has no"
                " Dense without a Pooling"
            )
        self._late = late = read_late_interaction(declared)
        expansion = late.expansion
        head = None if late.width is None else HeadSpec(width=late.width)
        text = read_encoder(config, body_of(config), pooling="none", head=head)
        hides = expansion is not None and not expansion.attended
        text = replace(text, keyed=hides)
        self._open(config, text, declared, options, max_tokens=options.max_tokens)
        self._first, self._last = self._two_ends()
        most = min(options.max_tokens, text.positions - self.unused_positions(config))
        # Lengths of the sides take the place of the tokenizer's, which PyLate writes as it last needed it.
        self._query = self._side(late.query, most, options.query_length)
        self._document = self._side(late.document, most, options.document_length)
        self.max_tokens = max(self._query.length, self._document.length)
        self._mask, self._expanded = self._expansion(options.query_length, most)
        self._hides = hides
        self._skipped_ids = self._skiplist()

    def _side(self, side: Side, most: int, asked: int) -> _Side:
        name, prompt = side.marker, side.prompt
        if name is None:
            # The reference's tokenizer finds these in the prompt, the longest of several.
            found = [added for added, token in self._tokenizer.added.items() if not token.get("normalized")]
            name = max((added for added in found if added and prompt.startswith(added)), key=len, default="")
            prompt = prompt.removeprefix(name)
        marker = self._token(name) if name else None
        begins = [self._first] if marker is None else [self._first, marker]
        if marker is None and prompt:
            begins, _ = self._beginning(prompt)
        # The reference pads and cuts at the length that is declared.
        length = min(asked or side.length or self.max_tokens, most)
        return _Side(marker=marker, name=name, prompt=prompt, length=length, begins=tuple(begins))

    def _token(self, name: str) -> int:
        """Return the id of a token by its name; raises ``CheckpointError``."""
        found = self._tokenizer.find(name)
        if found is None:
            raise CheckpointError(f"{self._tokenizer.path}: has no token {name!r}, which marks an input")
        return found

    def _expansion(self, asked: int, most: int) -> tuple[int, int]:
        """Return the token of the expansion, and how long queries become by it: 0 without one."""
        expansion = self._late.expansion
        if expansion is None:
            return -1, 0
        name = expansion.token or token_name(self.path, "mask_token", self.mask)
        return self._token(name), min(asked or expansion.length, most)

    def _skiplist(self) -> Skiplist | None:
        """Return whose rows are left out; a word that is no token is passed over, as in the reference.

        Raises ``CheckpointError`` where the tokens do not tell a query from a document.
        """
        late, query, document = self._late, self._query.begins, self._document.begins
        ids = {token for word in late.skiplist if (token := self._tokenizer.find(word)) is not None}
        unknown = self._tokenizer.find(token_name(self.path, "unk_token", self.unknown))
        ids = {token for token in ids if token != unknown or self.unknown in late.skiplist}
        if not ids or not late.skips:
            return None
        both = set(late.skips) == {"query", "document"}
        if not both:
            shortest = min(len(query), len(document))
            # No text has a token that marks an input.
            marked = self._query.marker not in (None, self._document.marker)
            if "document" not in late.skips or not (marked or query[:shortest] != document[:shortest]):
                raise CheckpointError(
                    f"{self.path}: has a skiplist for {' and '.join(late.skips)} alone, but queries and"
                    " documents do not begin with tokens of their own"
                )
        return Skiplist(tuple(sorted(ids)), () if both else query)

    @cached_property
    def output(self) -> Output:
        """A row of each token but those of the skiplist."""
        return replace(super().output, unit_length=self._late.unit_length, skiplist=self._skipped_ids)

    @property
    def head_names(self) -> Mapping[str, str]:
        return STANFORD_HEAD

    def _side_of(self, content: Content) -> _Side:
        return self._query if content.role is Role.QUERY else self._document

    def segments(self, content: Content, *, param: str) -> list[Segment]:
        """The marker, the prompt and the texts between the two tokens."""
        side = self._side_of(content)
        # Prompts of other names may repeat the marker.
        prompt = side.prompt if content.prompt is None else content.prompt.removeprefix(side.name)
        marker = [] if side.marker is None else [side.marker]
        return [self._first, *marker, Run(prompt, content.text), self._last]

    def prompt(self, content: Content, *, max_tokens: int, truncate: Truncate, param: str) -> Prompt:
        """Tokenise an input of texts, cut to its side's length, and expand a query."""
        if content.token_ids is not None:
            return super().prompt(content, max_tokens=max_tokens, truncate=truncate, param=param)
        side = self._side_of(content)
        if side.length <= max_tokens:
            max_tokens = side.length
            truncate = self.truncation_side if truncate is Truncate.NONE else truncate
        prompt = super().prompt(content, max_tokens=max_tokens, truncate=truncate, param=param)
        missing = self._missing(content, len(prompt.tokens))
        if not missing:
            return prompt
        behind = np.full(missing, self._mask, np.int32)
        return replace(prompt, tokens=np.concatenate((prompt.tokens, behind)))

    def pieces(self, text: str, *, role: Role, instruction: str | None = None, param: str) -> Sequence[Piece]:
        """The tokens of a text, and those that expand a query."""
        pieces = super().pieces(text, role=role, instruction=instruction, param=param)
        missing = self._missing(Content(parts=(text,), role=role), len(pieces))
        return [*pieces, *[Piece(token=self._mask, text=self.token_text(self._mask))] * missing]

    def _missing(self, content: Content, tokens: int) -> int:
        """Return how many tokens a query of so many is expanded by."""
        return max(0, self._expanded - tokens) if content.role is Role.QUERY else 0

    def positions(self, tokens: Int32Array, images: Sequence[ImagePlan]) -> Int32Array:
        """int32 ``[2, tokens]``: the row of each token among the positions, and its type.

        Where nobody attends to expansions, a row more: how many tokens come before the input's.
        """
        if not self._hides:
            return super().positions(tokens, images)
        keys = np.full(len(tokens), self._keys(tokens), np.int32)
        return np.stack((self.places(tokens), self.types(tokens), keys))

    def _keys(self, tokens: Int32Array) -> int:
        begins = self._query.begins
        if tokens[-1] != self._mask or tuple(tokens[: len(begins)].tolist()) != begins:
            return len(tokens)
        others = np.flatnonzero(tokens != self._mask)
        return int(others[-1]) + 1 if len(others) else len(tokens)
