"""What the model computes, from transformers' own modules: one input at a time, no batching, no cache.

Shares no code with Tessera. Text that spells out a special token is parsed here, as the tokenizer's
default is, so inputs for comparisons should not contain any.
"""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn import functional

if TYPE_CHECKING:
    from tests.models.running import Given

# (columns, rows) in the order in which the published processor tries them
GRIDS = [
    *((1, 1), (1, 2), (2, 1), (3, 1), (1, 3), (4, 1), (1, 4)),
    *((2, 2), (1, 5), (5, 1), (6, 1), (2, 3), (1, 6), (3, 2)),
]

PREFIXES = {"query": "query: ", "passage": "passage: ", "none": ""}


class Reference:
    """The checkpoint at ``path`` in ``dtype``; every method takes and gives single inputs."""

    def __init__(self, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
        # Seconds, in every process of tests: here only those pay that compute with it.
        from transformers import LlamaConfig, LlamaModel, SiglipVisionConfig, SiglipVisionModel

        path = Path(path)
        self.config = json.loads((path / "config.json").read_text())
        self.processor = json.loads((path / "processor_config.json").read_text())
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self.dtype = dtype
        weights: dict[str, torch.Tensor] = {}
        for file in sorted(path.glob("*.safetensors")):
            weights |= load_file(file)
        self.vision = _filled(
            SiglipVisionModel(_eager(SiglipVisionConfig(**self.config["vision_config"]))),
            weights,
            ("vision_model.vision_model.", "vision_model."),
            dtype,
        )
        self.text = _filled(
            LlamaModel(_eager(LlamaConfig(**_llama(self.config["llm_config"])))),
            weights,
            ("language_model.model.", "language_model."),
            dtype,
        )
        self.projector = {
            name.split("mlp1.")[1]: value.to(dtype) for name, value in weights.items() if "mlp1." in name
        }

    def vector(
        self, text: str | None, images: list[bytes], role: str, *, normalize: bool = True
    ) -> np.ndarray:
        """The final vector, float32 ``[hidden]``; ``role`` is query, passage or none."""
        tiles = [self.tiles(image) for image in images]
        tokens = self.tokens(text, [len(cut) for cut in tiles], role)
        rows = [self.vision_rows(cut) for cut in tiles]
        hidden = self.last_hidden(self.fused(tokens, rows))
        pooled = self.pooled(hidden)
        return (functional.normalize(pooled, dim=0, eps=1e-12) if normalize else pooled).numpy()

    def answer(self, given: Given) -> np.ndarray:
        """The unit vector of an input, whose images stand before its texts."""
        text = "".join(part for part in given.parts if isinstance(part, str))
        return self.vector(text or None, given.images, given.role.value)

    def tokens(self, text: str | None, tiles: list[int], role: str) -> list[int]:
        """Ids of the prompt for ``text`` and images of so many tiles each."""
        per_tile = self.processor["num_image_token"]
        blocks = ["<img>" + "<IMG_CONTEXT>" * (per_tile * count) + "</img> " for count in tiles]
        return self.tokenizer.encode(PREFIXES[role] + "".join(blocks) + (text or "")).ids

    def tiles(self, data: bytes) -> list[np.ndarray]:
        """uint8 ``[height, width, 3]`` tiles, thumbnail last."""
        image = upright_rgb(data)
        size = self.processor["image_size"]
        if not self.processor["dynamic_image_size"]:
            return [np.asarray(image.resize((size, size)))]
        columns, rows = grid(*image.size, size, self.processor["max_input_tiles"])
        scaled = image.resize((columns * size, rows * size))
        boxes = [
            (column * size, row * size, (column + 1) * size, (row + 1) * size)
            for row in range(rows)
            for column in range(columns)
        ]
        tiles = [np.asarray(scaled.crop(box)) for box in boxes]
        if self.processor["use_thumbnail"] and len(tiles) > 1:
            tiles.append(np.asarray(image.resize((size, size))))
        return tiles

    @torch.no_grad()
    def vision_features(self, tiles: list[np.ndarray]) -> torch.Tensor:
        """The selected hidden state, ``[tiles, patches, vision hidden]``."""
        return self.pixel_features(torch.from_numpy(self.pixels(tiles)))

    @staticmethod
    def pixels(tiles: list[np.ndarray]) -> np.ndarray:
        """uint8 tiles scaled and normalised, float32 ``[tiles, 3, height, width]``."""
        stacked = torch.from_numpy(np.stack(tiles)).permute(0, 3, 1, 2).float()
        return (((stacked / 255) - 0.5) / 0.5).numpy()

    @torch.no_grad()
    def pixel_features(self, pixels: torch.Tensor) -> torch.Tensor:
        """As ``vision_features``, of normalised pixels."""
        select = self.config["select_layer"]
        features = []
        for tile in pixels.to(self.dtype):
            output = self.vision(pixel_values=tile[None], output_hidden_states=True)
            chosen = output.last_hidden_state if select == -1 else output.hidden_states[select]
            features.append(chosen[0])
        return torch.stack(features)

    @torch.no_grad()
    def vision_rows(self, tiles: list[np.ndarray]) -> torch.Tensor:
        """Rows of the backbone's width, ``[tiles * tokens per tile, hidden]``."""
        return self.projected(self.vision_features(tiles))

    @torch.no_grad()
    def projected(self, features: torch.Tensor) -> torch.Tensor:
        """As ``vision_rows``, of the selected hidden state."""
        count, patches, channels = features.shape
        edge = round(patches**0.5)
        scale = self.config["downsample_ratio"]
        short, wide = round(edge * scale), round(channels / scale)
        shuffled = features.view(count, edge, edge, channels).view(count, edge, short, wide)
        shuffled = shuffled.transpose(1, 2).reshape(count, short, short, round(wide / scale))
        if self.config["ps_version"] == "v2":
            shuffled = shuffled.transpose(1, 2)
        rows = shuffled.reshape(count * short * short, -1)
        weights = self.projector
        rows = functional.layer_norm(rows, rows.shape[-1:], weights["0.weight"], weights["0.bias"], 1e-5)
        rows = functional.gelu(functional.linear(rows, weights["1.weight"], weights["1.bias"]))
        return functional.linear(rows, weights["3.weight"], weights["3.bias"])

    @torch.no_grad()
    def fused(self, tokens: list[int], rows: list[torch.Tensor]) -> torch.Tensor:
        """Token embeddings with vision rows in the placeholders' places, ``[tokens, hidden]``."""
        ids = torch.tensor(tokens)
        embedded = self.text.embed_tokens(ids).clone()
        if rows:
            embedded[ids == self.config["img_context_token_id"]] = torch.cat(rows)
        return embedded

    @torch.no_grad()
    def last_hidden(self, embedded: torch.Tensor) -> torch.Tensor:
        """Output of the backbone under a mask that hides nothing, ``[tokens, hidden]``."""
        length = len(embedded)
        mask = torch.zeros(1, 1, length, length, dtype=self.dtype)
        output = self.text(inputs_embeds=embedded[None], attention_mask=mask, use_cache=False)
        return output.last_hidden_state[0]

    def pooled(self, hidden: torch.Tensor) -> torch.Tensor:
        """What one sequence's states are pooled into, float32."""
        kind = self.config["pooling"]
        hidden = hidden.float()
        return {"avg": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[kind]


class ColEmbedReference(Reference):
    """Llama Nemotron ColEmbed VL: a vector of each token, and the prefix once more behind images."""

    def tokens(self, text: str | None, tiles: list[int], role: str) -> list[int]:
        return super().tokens((PREFIXES[role] if tiles else "") + (text or ""), tiles, role)

    def answer(self, given: Given) -> np.ndarray:
        """Float32 ``[tokens, hidden]``, rows of unit length."""
        cut = [self.tiles(image) for image in given.images]
        text = "".join(part for part in given.parts if isinstance(part, str))
        tokens = self.tokens(text, [len(tiles) for tiles in cut], given.role.value)
        hidden = self.last_hidden(self.fused(tokens, [self.vision_rows(tiles) for tiles in cut]))
        return functional.normalize(hidden, dim=-1, eps=1e-12).numpy()


def upright_rgb(data: bytes) -> Image.Image:
    """Decode an 8-bit image as a browser would show it on a white page."""
    image = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        page = Image.new("RGB", image.size, "white")
        page.paste(image, mask=image.getchannel("A"))
        return page
    return image.convert("RGB")


def grid(width: int, height: int, size: int, most: int) -> tuple[int, int]:
    """(columns, rows) for an image, at most ``most`` tiles of at most six."""
    best, chosen = float("-inf"), (1, 1)
    aspect = width / height
    for columns, rows in GRIDS:
        if columns * rows > most:
            continue
        shape = columns / rows
        score = min(columns * rows * size * size / (width * height), 0.6)
        score *= min(shape / aspect, aspect / shape)
        if score > best:
            best, chosen = score, (columns, rows)
    return chosen


def _llama(config: dict) -> dict:
    dropped = ("architectures", "model_type", "pooling")
    return {key: value for key, value in config.items() if key not in dropped}


def _eager(config):
    config._attn_implementation = "eager"
    return config


def _filled(module, weights: dict[str, torch.Tensor], prefixes: tuple[str, ...], dtype: torch.dtype):
    state = {}
    for name, value in weights.items():
        for prefix in prefixes:
            stem, found, rest = name.partition(prefix)
            if found and stem in ("", "model."):
                state[rest] = value
                break
    unused = ("lm_head.", "rotary_emb.inv_freq", "position_ids")
    state = {name: value for name, value in state.items() if not any(part in name for part in unused)}
    module.load_state_dict(state, strict=True)
    return module.to(dtype).eval()
