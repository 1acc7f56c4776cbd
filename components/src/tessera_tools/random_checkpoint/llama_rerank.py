"""Random checkpoints of Llama Nemotron Rerank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tessera.checkpoint.section import Section
from tessera.models.llama.config import SCORING
from tessera.models.llama_nemotron_rerank.model import Options, read_config
from tessera.models.tower import CONFIG_FILE
from tessera_tools.random_checkpoint.llama import SENTENCE_TRANSFORMERS_FILE, LlamaSpec, distribution
from tessera_tools.random_checkpoint.spec import Sizes
from tessera_tools.random_checkpoint.weights import RandomTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankSpec(LlamaSpec):
    """A checkpoint of Llama Nemotron Rerank; ``score.weight`` spreads the logits of pairs."""

    text_prefix: str = "model."
    temperature: float = 1.0

    def files(self, dtype: str, seed: int) -> dict[str, dict[str, Any]]:
        """The JSON files by name."""
        files = LlamaSpec.files(self, dtype, seed)
        del files[SENTENCE_TRANSFORMERS_FILE]
        files[CONFIG_FILE] |= {
            "architectures": [SCORING],
            "id2label": {"0": "LABEL_0"},
            "temperature": self.temperature,
        }
        return files

    def tensors(self, directory: Path) -> Iterator[RandomTensor]:
        """The tensors in the files' order; the JSON files are in ``directory`` already."""
        for name, shape in read_config(Section.read(directory / CONFIG_FILE), Options()).shapes().items():
            mean, deviation = distribution(name, shape)
            stored = "score.weight" if name == "head.weight" else self.text_prefix + name
            yield RandomTensor(name=stored, shape=shape, mean=mean, deviation=deviation)


TINY = RerankSpec(hidden=512, heads=8, kv_heads=2, head_dim=64, intermediate=512)

FULL = RerankSpec(
    hidden=2048,
    layers=16,
    heads=32,
    kv_heads=8,
    head_dim=64,
    intermediate=8192,
    base_vocab=128000,
    control_tokens=256,
)

SIZES: Final = Sizes(tiny=TINY, full=FULL)
