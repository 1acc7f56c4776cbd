"""A checkpoint of SPLADE as the rest of Tessera sees it; opening needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from tessera.checkpoint.declared import Splade as DeclaredSplade
from tessera.checkpoint.declared import read_declared
from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.checkpoint.weights import Shapes
from tessera.dtypes import FLOATS
from tessera.errors import CheckpointError
from tessera.models.base import Family, Feature, Output, OutputKind
from tessera.models.declared import role_prompts
from tessera.models.encoder.body import body_of
from tessera.models.encoder.config import read_encoder
from tessera.models.encoder.model import EncoderModel
from tessera.models.options import MaxTokens, OptionsFamily
from tessera.models.tower import NO_PROMPTS, nbytes
from tessera.nn.spec import VocabularySpec

if TYPE_CHECKING:
    from tessera.nn.text import TextTower

_PART: Final = "text.vocabulary."
_STEM: Final = _PART.removeprefix("text.")


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``task`` takes a masked language model for SPLADE that does not declare it, with the usual pooling.

    Prompts that are not empty win over declared ones. ``max_tokens`` bounds one input, and
    ``max_active_dims`` its weights: the largest are kept.
    """

    task: Literal["auto", "sparse"] = "auto"
    query_prompt: str = ""
    document_prompt: str = ""
    max_tokens: MaxTokens = 8_192
    max_active_dims: Annotated[int, msgspec.Meta(ge=1)] = 2_048


class Splade(EncoderModel):
    """Implements ``tessera.models.base.Model``; its default output is sparse."""

    family = "splade"
    version = 3
    kind = OutputKind.SPARSE
    # What comes before the head's product is not recorded.
    features = frozenset({Feature.FP8})

    def __init__(self, path: Path, options: Options) -> None:
        config, declared = Section.read(path / CONFIG_FILE), read_declared(path)
        self.prompts = role_prompts(
            declared, NO_PROMPTS, query=options.query_prompt, document=options.document_prompt
        )
        text = read_encoder(config, body_of(config), pooling="none")
        self._open(config, text, declared, options, max_tokens=options.max_tokens)
        pooling = declared.splade or DeclaredSplade()
        self._tied = config.flag("tie_word_embeddings", True)
        self._head = VocabularySpec(
            vocab_size=text.vocab_size,
            hidden=text.layer.hidden,
            activation=text.layer.activation,
            eps=text.layer.eps,
            tied=self._tied,
            most=min(options.max_active_dims, text.vocab_size),
            sums=pooling.strategy == "sum",
            twice=pooling.activation == "log1p_relu",
        )

    @cached_property
    def output(self) -> Output:
        return Output(kind=self.kind, width=1, most=self._head.most, unit_length=False)

    @property
    def stored_head(self) -> VocabularySpec:
        """The head as the weight files have it: a stored decoder is used. Raises ``CheckpointError``."""
        assert self._body.vocabulary is not None
        stored = f"{self._body.vocabulary[2]}weight" in self.stored_names
        return replace(self._head, tied=self._tied and not stored)

    @property
    def head_names(self) -> Mapping[str, str]:
        """The modules of the head; the decoder's own bias comes before the one beside it."""
        assert self._body.vocabulary is not None
        dense, norm, decoder, beside = self._body.vocabulary
        names = {dense: f"{_STEM}dense.", norm: f"{_STEM}norm.", decoder: _STEM}
        return names if f"{decoder}bias" in self.stored_names else names | {beside: _STEM}

    def stored_shapes(self) -> Shapes:
        """Every tensor of tower and head; raises ``CheckpointError``."""
        return super().stored_shapes() | self.stored_head.shapes(_PART)

    def load_text(self, *, dtype: str, device: str) -> TextTower:
        """Read the tower's tensors and the head's; raises ``CheckpointError``."""
        from tessera.nn.loading import load_vocabulary

        tower = super().load_text(dtype=dtype, device=device)
        return load_vocabulary(
            tower, self.stored_head, self.tensors(), part=_PART, dtype=dtype, name=self.output.name
        )

    def text_nbytes(self, dtype: str) -> int:
        """With a decoder of its own, unless files are there that have none."""
        try:
            head = self.stored_head
        except CheckpointError:
            head = replace(self._head, tied=False)
        return super().text_nbytes(dtype) + nbytes(head.shapes(), dtype)

    def text_activation_nbytes(self, dtype: str, tokens: int) -> int:
        """Beside the tower's, what the head makes of its states."""
        own, wide = self._head.activations(tokens)
        return super().text_activation_nbytes(dtype, tokens) + own * FLOATS[dtype].itemsize + 4 * wide


FAMILY: Family = OptionsFamily(
    model_types=("bert", "distilbert"),
    hub_models=(
        "naver/splade-v3",
        "naver/splade-cocondenser-ensembledistil",
        "opensearch-project/opensearch-neural-sparse-encoding-v2-distill",
        "prithivida/Splade_PP_en_v1",
    ),
    options=Options,
    opened=Splade,
    architectures=("BertForMaskedLM", "DistilBertForMaskedLM"),
    task="sparse",
)
