"""Both stages in one module: pixels and tokens in, vectors out."""

from __future__ import annotations

import torch
from torch import nn

from tessera.models.llama_nemotron_vl.stage_text import PaddedText
from tessera.models.llama_nemotron_vl.stage_vision import VisionStage


class FusedStage(nn.Module):
    """Always runs the encoder; rows without placeholders among their tokens never see what came of it.

    Every row brings its own tiles, so that each input has the batch as its first axis. The placeholders of
    a row take the rows of its tiles in order, which counting them finds without looking for them.
    """

    def __init__(
        self, vision: VisionStage, text: PaddedText, *, image_token_id: int, tokens_per_tile: int
    ) -> None:
        super().__init__()
        self.vision = vision
        self.text = text
        self._image_token_id = image_token_id
        self._tokens_per_tile = tokens_per_tile

    def forward(
        self, tiles: torch.Tensor, input_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 ``[sequences, tiles, channels, size, size]`` and two int32 ``[sequences, tokens]``."""
        rows = self.vision(tiles.flatten(0, 1))
        each = tiles.shape[1] * self._tokens_per_tile
        is_image = input_ids == self._image_token_id
        within = is_image.to(torch.int32).cumsum(1, dtype=torch.int32) - 1
        first = torch.arange(tiles.shape[0], device=tiles.device, dtype=torch.int32) * each
        # More placeholders than rows is the caller's mistake; it must not read beyond them.
        vision_map = torch.where(is_image, first[:, None] + within.clamp(max=each - 1), -1)
        vectors, norms = self.text(input_ids, attention_mask, rows, vision_map)
        return vectors, norms
