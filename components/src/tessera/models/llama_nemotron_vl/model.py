"""A checkpoint of this family as the rest of Tessera sees it; importing and opening need no torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tessera.checkpoint.fingerprint import fingerprint
from tessera.checkpoint.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from tessera.checkpoint.weights import Shapes
from tessera.dtypes import FLOATS
from tessera.models.base import (
    Content,
    Feature,
    ImagePlan,
    Int32Array,
    Output,
    OutputKind,
    Piece,
    Pixels,
    Prompt,
    Role,
    TextModule,
    Truncate,
    VisionModule,
    VisionSpec,
    sequential,
)
from tessera.models.llama_nemotron_vl.config import ModelConfig
from tessera.models.llama_nemotron_vl.config_reader import CONFIG_FILE, PROCESSOR_FILE, read_config
from tessera.models.llama_nemotron_vl.layers import text_spec, vision_activations
from tessera.models.llama_nemotron_vl.preprocess import preprocess
from tessera.models.llama_nemotron_vl.prompt import PromptBuilder
from tessera.models.llama_nemotron_vl.tensors import text_shapes, used_for_vision
from tessera.models.llama_nemotron_vl.tiling import count_tiles
from tessera.models.llama_nemotron_vl.tokenizer import TextTokenizer
from tessera.models.prompts import refuse_instruction

if TYPE_CHECKING:
    from tessera.models.base import Model
    from tessera.models.graph import DescribesNetworks, Graph, NetworkRequest
    from tessera.models.stages import StageFamily, StageModule

FAMILY_NAME = "llama_nemotron_vl"

# Raised by hand whenever preprocessing, prompts or the forward pass change what they compute.
_REVISION = b"llama_nemotron_vl 1"
_FINGERPRINTED = (CONFIG_FILE, PROCESSOR_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE)


class LlamaNemotronVL:
    """Implements ``tessera.models.base.Model``; thread-safe once opened."""

    def __init__(self, path: Path, config: ModelConfig, prompts: PromptBuilder) -> None:
        self.path = path
        self.config = config
        self._prompts = prompts

    @classmethod
    def open(cls, path: Path) -> LlamaNemotronVL:
        """Read configuration and tokenizer; the weights are not looked at. Raises ``CheckpointError``."""
        config = read_config(path)
        prompts = PromptBuilder(
            TextTokenizer.open(path, config),
            config.prompt,
            vocab_size=config.text.vocab_size,
        )
        return cls(path, config, prompts)

    @property
    def family(self) -> str:
        return FAMILY_NAME

    @cached_property
    def fingerprint(self) -> str:
        """Computed from the files at the first use; raises ``CheckpointError`` without weight files."""
        return fingerprint(self.path, revision=_REVISION, files=_FINGERPRINTED)

    @property
    def output(self) -> Output:
        return Output(kind=OutputKind.VECTOR, width=self.config.text.hidden)

    @cached_property
    def vision(self) -> VisionSpec:
        size = self.config.image.tile_size
        return VisionSpec(
            row_width=self.config.text.hidden,
            unit_shape=(self.config.vision.channels, size, size),
            largest=self._tiled(self.config.max_tiles),
            independent_units=True,
        )

    @property
    def max_tokens(self) -> int:
        return self.config.max_tokens

    @property
    def vocab_size(self) -> int:
        return self.config.text.vocab_size

    @property
    def dimensions(self) -> frozenset[int]:
        return self.config.dimensions

    @property
    def features(self) -> frozenset[Feature]:
        return frozenset(Feature)

    def plan(self, width: int, height: int, *, param: str) -> ImagePlan:
        return self._tiled(count_tiles(width, height, self.config.image))

    def _tiled(self, tiles: int) -> ImagePlan:
        return ImagePlan(units=tiles, rows=tiles * self.config.tokens_per_tile)

    def prompt(self, content: Content, *, max_tokens: int, truncate: Truncate, param: str) -> Prompt:
        return self._prompts.build(content, max_tokens=max_tokens, truncate=truncate, param=param)

    def pieces(self, text: str, *, role: Role, instruction: str | None = None, param: str) -> Sequence[Piece]:
        refuse_instruction(Content(parts=(text,), instruction=instruction), param=param)
        return self._prompts.pieces(text, role=role, param=param)

    def token_text(self, token: int) -> str:
        return self._prompts.token_text(token)

    def vision_index(self, tokens: Int32Array) -> Int32Array:
        return np.flatnonzero(tokens == self.config.prompt.image_token_id).astype(np.int32)

    def positions(self, tokens: Int32Array, images: Sequence[ImagePlan]) -> Int32Array:
        return sequential(len(tokens))

    def unit_positions(self, image: ImagePlan) -> Int32Array:
        """Tiles know their places themselves: int32 ``[0, units]``."""
        return np.empty((0, image.units), np.int32)

    def preprocess(self, data: bytes, *, param: str) -> Pixels:
        tiles = preprocess(data, self.config.image, param=param)
        return Pixels(values=tiles, plan=self._tiled(len(tiles)))

    def load_vision(self, *, dtype: str, device: str) -> VisionModule:
        """Read the vision and projector tensors; raises ``CheckpointError``."""
        from tessera.models.llama_nemotron_vl.loading import load_vision

        return load_vision(self.path, self.config, dtype=dtype, device=device)

    def load_text(self, *, dtype: str, device: str) -> TextModule:
        """Read the language tensors; raises ``CheckpointError``."""
        from tessera.models.llama_nemotron_vl.loading import load_text

        return load_text(self.path, self.config, dtype=dtype, device=device)

    @property
    def image_token_id(self) -> int:
        return self.config.prompt.image_token_id

    def load_stage(
        self, stage: str, *, layout: str, dtype: str, device: str, max_sequences: int = 1024
    ) -> StageModule:
        """A part of the model for compilers; raises ``CheckpointError`` or ``ConfigError``."""
        from tessera.models.llama_nemotron_vl.stages import load_stage

        return load_stage(
            self.path,
            self.config,
            stage,
            layout=layout,
            dtype=dtype,
            device=device,
            max_sequences=max_sequences,
        )

    def describe_network(self, graph: Graph, request: NetworkRequest) -> None:
        """Implements ``tessera.models.graph.DescribesNetworks``."""
        from tessera.models.llama_nemotron_vl.networks import describe_network

        describe_network(self.path, self.config, graph, request)

    def vision_nbytes(self, dtype: str) -> int:
        return _nbytes(used_for_vision(self.config), dtype)

    def text_nbytes(self, dtype: str) -> int:
        return _nbytes(text_shapes(self.config.text), dtype)

    def vision_activation_nbytes(self, dtype: str, units: int) -> int:
        return vision_activations(self.config, units) * FLOATS[dtype].itemsize

    def text_activation_nbytes(self, dtype: str, tokens: int) -> int:
        return text_spec(self.config.text).activations(tokens) * FLOATS[dtype].itemsize


def _nbytes(shapes: Shapes, dtype: str) -> int:
    return sum(map(prod, shapes.values())) * FLOATS[dtype].itemsize


if TYPE_CHECKING:
    _conforms: type[Model] = LlamaNemotronVL
    _offers_stages: type[StageFamily] = LlamaNemotronVL
    _describes: type[DescribesNetworks] = LlamaNemotronVL
