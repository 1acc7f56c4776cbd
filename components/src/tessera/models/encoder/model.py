"""A checkpoint of an encoder as the rest of Tessera sees it; opening needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import numpy as np

from tessera.checkpoint.declared import Declared, read_declared
from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.checkpoint.tokenizer import token_name
from tessera.checkpoint.tokenizer_class import BERT_CLASSES, tokenizer_class
from tessera.errors import CheckpointError
from tessera.models.base import ImagePlan, Int32Array
from tessera.models.declared import role_prompts, skipped_prompts
from tessera.models.encoder.body import Body, body_of
from tessera.models.encoder.config import Names, read_encoder
from tessera.models.marks import Marks, marks_of
from tessera.models.options import MaxTokens
from tessera.models.tower import NO_PROMPTS, TowerModel
from tessera.nn.spec import EncoderSpec, Pooling


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``pooling`` is for a checkpoint that declares none; prompts that are not empty win over declared ones.

    Without either it is the mean. ``max_tokens`` bounds one input.
    """

    pooling: Literal["declared", "mean", "cls", "lasttoken"] = "declared"
    query_prompt: str = ""
    document_prompt: str = ""
    max_tokens: MaxTokens = 8_192


class PairOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``activation`` makes the score of a logit; ``max_tokens`` bounds one pair."""

    activation: Literal["declared", "sigmoid", "identity"] = "declared"
    max_tokens: MaxTokens = 8_192


class ColbertOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``query_length`` and ``document_length`` are tokens of an input of either side; 0: as declared.

    Both are at most ``max_tokens``.
    """

    query_length: Annotated[int, msgspec.Meta(ge=0)] = 0
    document_length: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_tokens: MaxTokens = 8_192


_POOLINGS: Final[dict[str, Pooling]] = {
    "declared": "mean",
    "mean": "mean",
    "cls": "first",
    "lasttoken": "last",
}


# The classes that put these two tokens around a text, whatever ``post_processor`` says (transformers 5.23).
TWO_ENDS: Final[dict[str, tuple[str, str]]] = {
    **dict.fromkeys((*BERT_CLASSES, "MPNetTokenizer", "RobertaTokenizer"), ("cls_token", "sep_token")),
    **dict.fromkeys(("XLMRobertaTokenizer", "CamembertTokenizer"), ("bos_token", "eos_token")),
}


class EncoderModel(TowerModel):
    """Base of encoders; an input is a first token, a prompt with the texts, and a last token."""

    lowers_case = True
    finds_words = True
    _skipped: Sequence[tuple[list[int], int]] = ()

    def __init__(self, path: Path, options: Options) -> None:
        config, declared = Section.read(path / CONFIG_FILE), read_declared(path)
        self.prompts = role_prompts(
            declared,
            NO_PROMPTS,
            query=options.query_prompt,
            document=options.document_prompt,
            leaves_out=True,
        )
        skipped = skipped_prompts(declared, self.prompts)
        if declared.pooling is None and options.pooling == "declared":
            self.lacking_keys = ("pooling",)
        text = read_encoder(config, body_of(config), pooling=_POOLINGS[options.pooling])
        text = replace(text, skips=bool(skipped))
        self._open(config, text, declared, options, max_tokens=options.max_tokens)
        self._skipped = sorted(map(self._beginning, skipped), key=lambda begin: -len(begin[0]))

    def _beginning(self, prompt: str) -> tuple[list[int], int]:
        """Return the tokens that every input with a prompt begins with, and how many pooling leaves out.

        These are the tokens before it and as many as the prompt has alone, as the reference counts them; its
        last one may be another before a text. Raises ``CheckpointError`` for a prompt that has no other.
        """
        encoding = self._tokenizer.encode(f"{prompt}x")
        spans = zip(encoding.ids, encoding.offsets, strict=True)
        own = [token for token, (_, end) in spans if end <= len(prompt)]
        if not own:
            raise CheckpointError(f"{self.path}: no token of the prompt {prompt!r} is before every text")
        before = self.marks.before
        return [*before, *own], len(before) + len(self._tokenizer.ids(prompt))

    def _open(
        self,
        config: Section,
        text: EncoderSpec,
        declared: Declared,
        options: msgspec.Struct,
        *,
        max_tokens: int,
    ) -> None:
        path = config.path.parent
        self._body: Body = body_of(config)
        self._types = text.types
        most = min(max_tokens, text.positions - self.unused_positions(config))
        if declared.limit_of_tokenizer and declared.max_tokens is not None:
            # Which of an encoder the reference counts without modules.json, too.
            most = min(most, declared.max_tokens)
        TowerModel.__init__(self, path, text, options, max_tokens=most, declared=declared)
        self.marks = self._marks(path)
        usual = [self._tokenizer.find(end) for end in (self._body.first, self._body.last)]
        if [*self.marks.before, *self.marks.behind] != usual:
            # The fingerprint knows no other trace of them.
            changes = f"{self._tokenizer.changes} {self.marks}"
            self._tokenizer = replace(self._tokenizer, changes=changes)

    def _marks(self, path: Path) -> Marks:
        """Return what stands around a text: two tokens that the class of the tokenizer names.

        Other classes put around it what their files say, whatever that is. Raises ``CheckpointError``.
        """
        names = TWO_ENDS.get(tokenizer_class(path))
        if names is None:
            return marks_of(self._tokenizer)
        ends = zip(names, (self._body.first, self._body.last), strict=True)
        first, last = (self._tokenizer.id_of(token_name(path, *end)) for end in ends)
        return Marks((first,), (last,))

    def _two_ends(self) -> tuple[int, int]:
        """Return the first and the last token of a family that needs both; raises ``CheckpointError``."""
        match self.marks:
            case Marks((first,), (last,)):
                return first, last
        raise CheckpointError(
            f"{self._tokenizer.path}: post_processor puts {list(self.marks.before)} before and"
            f" {list(self.marks.behind)} behind a text; family {self.family} needs one token on either side"
        )

    def unused_positions(self, config: Section) -> int:
        """Return how many rows of the positions no token has."""
        return 0

    def positions(self, tokens: Int32Array, images: Sequence[ImagePlan]) -> Int32Array:
        """int32 ``[2, tokens]``: the row of each token among the positions, and its type.

        Where pooling leaves out prompts, a row more: how many tokens of the input it leaves out.
        """
        if not self._skipped:
            return np.stack((self.places(tokens), self.types(tokens)))
        begins = (count for own, count in self._skipped if tokens[: len(own)].tolist() == own)
        left_out = np.full(len(tokens), next(begins, 0), np.int32)
        return np.stack((self.places(tokens), self.types(tokens), left_out))

    def places(self, tokens: Int32Array) -> Int32Array:
        """int32 ``[tokens]``: the row of each token among the learned positions."""
        return np.arange(len(tokens), dtype=np.int32)

    def types(self, tokens: Int32Array) -> Int32Array:
        """int32 ``[tokens]``: a single text is of type 0."""
        return np.zeros(len(tokens), np.int32)

    @property
    def head_names(self) -> Mapping[str, str]:
        """What the files call the modules of the head, if there is one, and what they are called here."""
        return {}

    @cached_property
    def _names(self) -> Names:
        return Names(self.text.layers, self._body, self.head_names)

    def stored_name(self, name: str) -> str | None:
        return self._names(name)
