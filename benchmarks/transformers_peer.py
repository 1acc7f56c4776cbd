"""The same checkpoint by ``transformers`` as a user would write it: padded batches, one after the other.

Shares no code with the service. Images are decoded and cut on the calling thread, between batches.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaConfig, LlamaModel, SiglipVisionConfig, SiglipVisionModel

# (columns, rows) in the order in which the published processor tries them
_GRIDS = (
    *((1, 1), (1, 2), (2, 1), (3, 1), (1, 3), (4, 1), (1, 4)),
    *((2, 2), (1, 5), (5, 1), (6, 1), (2, 3), (1, 6), (3, 2)),
)
_PREFIX = {True: "passage: ", False: ""}


class TransformersPeer:
    """``device`` and ``dtype`` as torch names them; attention by SDPA, the fastest that needs no package."""

    def __init__(self, path: Path, *, device: str, dtype: torch.dtype) -> None:
        config = json.loads((path / "config.json").read_text())
        self._processor = json.loads((path / "processor_config.json").read_text())
        self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self._image_token = config["img_context_token_id"]
        self._scale = config["downsample_ratio"]
        self._device, self._dtype = device, dtype
        weights: dict[str, torch.Tensor] = {}
        for file in sorted(path.glob("*.safetensors")):
            weights |= load_file(file)
        vision = SiglipVisionConfig(**config["vision_config"], attn_implementation="sdpa")
        text = LlamaConfig(
            **{key: value for key, value in config["llm_config"].items() if key != "model_type"},
            attn_implementation="sdpa",
        )
        self._vision = self._filled(SiglipVisionModel(vision), weights, "vision_model.vision_model.")
        self._text = self._filled(LlamaModel(text), weights, "language_model.")
        self._projector = {
            name.removeprefix("mlp1."): value.to(device, dtype)
            for name, value in weights.items()
            if name.startswith("mlp1.")
        }

    def _filled(
        self, module: torch.nn.Module, weights: dict[str, torch.Tensor], prefix: str
    ) -> torch.nn.Module:
        # Which prefixes the module's own names have differs between versions of transformers.
        own = {name.removeprefix("vision_model."): name for name in module.state_dict()}
        found = {}
        for name, value in weights.items():
            short = name.removeprefix(prefix).removeprefix("model.")
            if name.startswith(prefix) and short in own:
                found[own.pop(short)] = value
        missing = [name for name in own if "head." not in name]
        if missing:
            raise ValueError(f"the checkpoint has no tensor for {', '.join(missing[:3])}")
        module.load_state_dict(found, strict=False)
        # Not the buffers: with frequencies in bfloat16, RoPE turns the thousandth token by up to two radians
        # too many, as no module does that `from_pretrained` made.
        for parameter in module.parameters():
            parameter.data = parameter.data.to(self._dtype)
        return module.to(self._device).eval()

    @torch.inference_mode()
    def embed(self, inputs: Sequence[tuple[str, bytes | None]]) -> npt.NDArray[np.float32]:
        """One batch of (text, image file or None) to unit vectors, float32 ``[batch, hidden]``."""
        tiles = [self._tiles(image) if image is not None else None for _, image in inputs]
        prompts = []
        for (text, _), cut in zip(inputs, tiles, strict=True):
            block = ""
            if cut is not None:
                context = "<IMG_CONTEXT>" * (self._processor["num_image_token"] * len(cut))
                block = f"<img>{context}</img> "
            prompts.append(_PREFIX[cut is not None] + block + text)
        encoded = [encoding.ids for encoding in self._tokenizer.encode_batch(prompts)]
        longest = max(map(len, encoded))
        ids = torch.zeros(len(encoded), longest, dtype=torch.long)
        mask = torch.zeros(len(encoded), longest, dtype=torch.bool)
        for row, tokens in enumerate(encoded):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = True
        ids, mask = ids.to(self._device), mask.to(self._device)
        embedded = self._text.embed_tokens(ids)  # type: ignore[operator]
        pixels = [cut for cut in tiles if cut is not None]
        if pixels:
            rows = self._rows(np.concatenate(pixels))
            places = (ids == self._image_token).unsqueeze(-1).expand_as(embedded)
            embedded = embedded.masked_scatter(places, rows)
        # Hides the padding and nothing else: the backbone looks both ways.
        seen = mask[:, None, None, :].expand(-1, 1, longest, -1)
        hidden = self._text(inputs_embeds=embedded, attention_mask=seen, use_cache=False).last_hidden_state
        weight = mask.unsqueeze(-1).float()
        pooled = (hidden.float() * weight).sum(1) / weight.sum(1)
        vectors: npt.NDArray[np.float32] = functional.normalize(pooled, dim=-1).cpu().numpy()
        return vectors

    def _rows(self, tiles: npt.NDArray[np.uint8]) -> torch.Tensor:
        pixels = torch.from_numpy(tiles).to(self._device).permute(0, 3, 1, 2)
        pixels = ((pixels.float() / 255 - 0.5) / 0.5).to(self._dtype)
        features = self._vision(pixel_values=pixels).last_hidden_state
        count, patches, channels = features.shape
        edge = round(patches**0.5)
        short, wide = round(edge * self._scale), round(channels / self._scale)
        shuffled = features.view(count, edge, short, wide).transpose(1, 2)
        shuffled = shuffled.reshape(count, short, short, round(wide / self._scale)).transpose(1, 2)
        rows = shuffled.reshape(count * short * short, -1)
        weights = self._projector
        rows = functional.layer_norm(rows, rows.shape[-1:], weights["0.weight"], weights["0.bias"], 1e-5)
        rows = functional.gelu(functional.linear(rows, weights["1.weight"], weights["1.bias"]))
        return functional.linear(rows, weights["3.weight"], weights["3.bias"])

    def _tiles(self, data: bytes) -> npt.NDArray[np.uint8]:
        """uint8 ``[tiles, height, width, 3]``, thumbnail last."""
        image = Image.open(BytesIO(data)).convert("RGB")
        size = self._processor["image_size"]
        columns, rows = _grid(image.width, image.height, size)
        scaled = np.asarray(image.resize((columns * size, rows * size)))
        cut = [
            scaled[row * size : (row + 1) * size, column * size : (column + 1) * size]
            for row in range(rows)
            for column in range(columns)
        ]
        if len(cut) > 1:
            cut.append(np.asarray(image.resize((size, size))))
        return np.stack(cut)


def _grid(width: int, height: int, size: int) -> tuple[int, int]:
    """The grid that covers the most of the image's area, up to a limit, at the least distortion."""
    aspect, area = width / height, width * height

    def score(grid: tuple[int, int]) -> float:
        shape = grid[0] / grid[1]
        filled = min(grid[0] * grid[1] * size * size / area, 0.6)
        return filled * min(shape / aspect, aspect / shape)

    return max(_GRIDS, key=score)
