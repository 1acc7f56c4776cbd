"""What Nemotron-3.5-Embed computes, from transformers' own Pixtral, Mistral 3 and Ministral 3.

Shares no code with Tessera. Prompts are made by transformers' own processor from the checkpoint's files.
"""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional

from tests.references.ministral3 import POOLINGS

if TYPE_CHECKING:
    from tests.models.running import Given

PROMPTS = {"query": "query:", "passage": "passage:", "none": ""}


class Mistral3Reference:
    """The checkpoint at ``path``, in float32; images are encoded files."""

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoTokenizer, Mistral3Config, Mistral3Model
        from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

        path = Path(path)
        self.config = json.loads((path / "config.json").read_text())
        known = {
            key: value for key, value in self.config.items() if key not in ("architectures", "model_type")
        }
        self.model = Mistral3Model._from_config(Mistral3Config(**known), attn_implementation="eager")
        weights: dict[str, torch.Tensor] = {}
        for file in sorted(path.glob("*.safetensors")):
            weights |= load_file(file)
        self.model.load_state_dict(
            {name.removeprefix("model."): value for name, value in weights.items()}, strict=True
        )
        self.model.float().eval()
        settings = json.loads((path / "processor_config.json").read_text())
        nested = settings.pop("image_processor", None)
        pictures = nested or json.loads((path / "preprocessor_config.json").read_text())
        pictures.pop("image_processor_type")
        # The class around both needs torchvision, of which it uses nothing.
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.edge = settings["patch_size"] * settings["spatial_merge_size"]
        self.pictures = PixtralImageProcessorPil(**pictures)
        self.marks = [settings[f"image_{name}token"] for name in ("", "break_", "end_")]
        self.causal = self.config["text_config"].get("is_causal", True)
        self.pool = POOLINGS[self.config.get("pooling", "avg")]

    def processed(self, given: Given) -> dict[str, Any]:
        """Ids, and of images pixels and their sizes, as the processor makes them of a turn."""
        pictures = [
            Image.open(BytesIO(part)).convert("RGB") for part in given.parts if isinstance(part, bytes)
        ]
        text = "".join(part for part in given.parts if isinstance(part, str))
        content: list[dict[str, Any]] = [{"type": "image"} for _ in pictures]
        if text:
            content.append({"type": "text", "text": text})
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if prompt := PROMPTS[given.role.value]:
            messages.insert(0, {"role": "system", "content": [{"type": "text", "text": prompt}]})
        rendered = self.tokenizer.apply_chat_template(messages, tokenize=False)
        made: dict[str, Any] = {}
        if pictures:
            edges = {"height": self.edge, "width": self.edge}
            made = dict(self.pictures(pictures, patch_size=edges, return_tensors="pt"))
            made["image_sizes"] = torch.tensor([[int(side) for side in size] for size in made["image_sizes"]])
            for size in made["image_sizes"]:
                rendered = rendered.replace(self.marks[0], self.expanded(*size.tolist()), 1)
        return made | dict(self.tokenizer([rendered.replace("<row>", self.marks[0])], return_tensors="pt"))

    def expanded(self, height: int, width: int) -> str:
        """An image's tokens as the processor spells them; ``<row>`` is one of a vision row."""
        _, row_end, image_end = self.marks
        row = "<row>" * (width // self.edge)
        return row_end.join([row] * (height // self.edge)) + image_end

    def tokens(self, given: Given) -> list[int]:
        ids: list[int] = self.processed(given)["input_ids"][0].tolist()
        return ids

    @torch.no_grad()
    def patches(self, pixels: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """The tower's last states, patches of all images row by row: ``[patches, hidden]``."""
        states: torch.Tensor = self.model.vision_tower(pixels, image_sizes=sizes).last_hidden_state[0]
        return states

    @torch.no_grad()
    def rows(self, pixels: torch.Tensor, sizes: torch.Tensor) -> list[torch.Tensor]:
        """The vision rows of each image."""
        projected = self.model.multi_modal_projector(self.patches(pixels, sizes), sizes)
        merged = sizes // (self.model.vision_tower.patch_size * self.config["spatial_merge_size"])
        return list(projected.split(merged.prod(1).tolist()))

    @torch.no_grad()
    def hidden(self, given: Given) -> torch.Tensor:
        """After the final norm: ``[tokens, hidden]``."""
        made = self.processed(given)
        ids = made["input_ids"]
        embedded = self.model.language_model.embed_tokens(ids).clone()
        if "pixel_values" in made:
            rows = self.rows(made["pixel_values"].float(), made["image_sizes"])
            embedded[ids == self.config["image_token_index"]] = torch.cat(rows)
        count = ids.shape[1]
        mask = torch.zeros(1, 1, count, count)
        if self.causal:
            mask += torch.full((count, count), -torch.inf).triu(1)
        output = self.model.language_model(inputs_embeds=embedded, attention_mask=mask, use_cache=False)
        return output.last_hidden_state[0]

    @torch.no_grad()
    def whole(self, given: Given) -> np.ndarray:
        """The vector by the one call that transformers offers for all of it."""
        output = self.model(**self.processed(given), use_cache=False)
        return functional.normalize(self.pool(output.last_hidden_state[0]), dim=0, eps=1e-12).numpy()

    def answer(self, given: Given) -> np.ndarray:
        """The unit vector of an input of texts and encoded images."""
        return functional.normalize(self.pool(self.hidden(given)), dim=0, eps=1e-12).numpy()
