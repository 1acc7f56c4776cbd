"""Random checkpoints of Llama Nemotron Rerank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from tessera.checkpoint.section import CONFIG_FILE
from tessera.models.base import OutputKind
from tessera.models.llama.config import SCORING
from tessera_tools.random_checkpoint.llama import PUBLISHED, SENTENCE_TRANSFORMERS_FILE, SMALL, LlamaSpec
from tessera_tools.random_checkpoint.spec import Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankSpec(LlamaSpec):
    """A checkpoint of Llama Nemotron Rerank; ``score.weight`` spreads the logits of pairs."""

    kind: ClassVar[OutputKind] = OutputKind.SCORE

    text_prefix: str = "model."
    temperature: float = 1.0

    def files(self, dtype: str, seed: int) -> dict[str, dict[str, Any]]:
        files = LlamaSpec.files(self, dtype, seed)
        del files[SENTENCE_TRANSFORMERS_FILE]
        files[CONFIG_FILE] |= {
            "architectures": [SCORING],
            "id2label": {"0": "LABEL_0"},
            "temperature": self.temperature,
        }
        return files


TINY = RerankSpec(**SMALL)
FULL = RerankSpec(**PUBLISHED)

SIZES: Final = Sizes(tiny=TINY, full=FULL)
