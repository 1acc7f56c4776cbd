"""What models of two towers compute, from transformers' own classes reading the same files.

Shares no code with Tessera. Pixels go through the processors that Pillow resizes for.
"""

from __future__ import annotations

import io
import json
import re
import string
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch.nn import functional

if TYPE_CHECKING:
    from tests.models.running import Given


class TowersReference:
    """The checkpoint at ``path``, in float32."""

    model_class: ClassVar[str]
    processor_class: ClassVar[str]

    def __init__(self, path: str | Path) -> None:
        import transformers

        self.tokenizer = Tokenizer.from_file(str(Path(path) / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.model: Any = getattr(transformers, self.model_class).from_pretrained(path, dtype=torch.float32)
        self.model.eval()
        self.processor: Any = getattr(transformers, self.processor_class).from_pretrained(path)

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def pixels(self, data: bytes) -> dict[str, torch.Tensor]:
        """What the processor makes of an image file."""
        image = Image.open(io.BytesIO(data)).convert("RGB")
        return dict(self.processor(images=[image], return_tensors="pt"))

    @torch.no_grad()
    def text_vector(self, tokens: list[int]) -> np.ndarray:
        return _unit(self.model.get_text_features(input_ids=torch.tensor([tokens])).pooler_output[0])

    @torch.no_grad()
    def image_vector(self, pixels: dict[str, torch.Tensor]) -> np.ndarray:
        return _unit(self.model.get_image_features(**pixels).pooler_output[0])

    def answer(self, given: Given) -> np.ndarray:
        """The unit vector of a text, or of an image."""
        if given.images:
            return self.image_vector(self.pixels(given.images[0]))
        return self.text_vector(self.tokens("".join(map(str, given.parts))))


class SiglipReference(TowersReference):
    """Texts are canonical, or with a vocabulary of bytes lower case, and padded to the fixed length."""

    model_class = "SiglipModel"
    processor_class = "SiglipImageProcessorPil"

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        files = json.loads((Path(path) / "tokenizer_config.json").read_text())
        self.pad, self.end = map(self.tokenizer.token_to_id, (files["pad_token"], files["eos_token"]))
        self.length: int = self.model.config.text_config.max_position_embeddings
        model = json.loads((Path(path) / "tokenizer.json").read_text())["model"]["type"]
        self.punctuation = "" if model == "BPE" else string.punctuation

    def tokens(self, text: str) -> list[int]:
        text = text.lower()
        if self.punctuation:
            text = text.translate(str.maketrans("", "", self.punctuation))
            text = re.sub(r"\s+", " ", text).strip()
        ids = [*self.tokenizer.encode(text, add_special_tokens=False).ids, self.end]
        return ids + [self.pad] * (self.length - len(ids))


class Siglip2Reference(SiglipReference):
    model_class = "Siglip2Model"
    processor_class = "Siglip2ImageProcessorPil"


class ClipReference(TowersReference):
    model_class = "CLIPModel"
    processor_class = "CLIPImageProcessorPil"


def _unit(row: torch.Tensor) -> np.ndarray:
    return functional.normalize(row, dim=0, eps=1e-12).numpy()
