"""The tokenizer of this family, with the ids of its control tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.checkpoint.tokenizer import PlainTokenizer
from tessera.errors import CheckpointError
from tessera.models.llama.prompt import bos_of
from tessera.models.llama_nemotron_vl.config import ModelConfig

IMAGE_START: Final = "<img>"
IMAGE_END: Final = "</img>"
IMAGE_CONTEXT: Final = "<IMG_CONTEXT>"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTokenizer:
    """Text to ids, and the ids that text can never produce. Thread-safe."""

    plain: PlainTokenizer
    bos: int
    image_start: int
    image_end: int
    image_context: int
    strips_before_image: bool
    strips_after_image: bool

    @classmethod
    def open(cls, directory: Path, config: ModelConfig) -> TextTokenizer:
        """Read ``tokenizer.json`` and the name of the first token from ``tokenizer_config.json``.

        Raises ``CheckpointError`` for a file that is no tokenizer, for a control token it lacks, and for
        ids that disagree with the model's configuration.
        """
        plain = PlainTokenizer.read(directory, vocab_size=config.text.vocab_size)
        start, end, context = map(plain.id_of, (IMAGE_START, IMAGE_END, IMAGE_CONTEXT))
        if context != config.prompt.image_token_id:
            raise CheckpointError(
                f"{plain.path}: {IMAGE_CONTEXT} has id {context},"
                f" but img_context_token_id is {config.prompt.image_token_id}"
            )
        return cls(
            plain=plain,
            bos=bos_of(plain),
            image_start=start,
            image_end=end,
            image_context=context,
            strips_before_image=bool(plain.added[IMAGE_START].get("lstrip")),
            strips_after_image=bool(plain.added[IMAGE_END].get("rstrip")),
        )
