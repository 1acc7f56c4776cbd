"""The stages of a model that engines are built from: those of its family, and the two of a page in one."""

from __future__ import annotations

import torch
from torch import nn

from tessera.errors import ConfigError
from tessera.models.base import Model
from tessera.models.stages import StageFamily, StageModule, StageTensor, check_stage
from tessera.models.text_stages import TEXT_STAGES
from tessera_engines.compiled.spec import Stage


class FusedStage(nn.Module):
    """Both stages in one: pixels and tokens in, vectors out.

    Always runs the encoder; rows without placeholders among their tokens never see what came of it. Every row
    brings its own tiles, so that each input has the batch as its first axis. The placeholders of
    a row take the rows of its tiles in order, which counting them finds without looking for them.
    """

    def __init__(
        self, vision: nn.Module, text: nn.Module, *, image_token_id: int, tokens_per_tile: int
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
        per_sequence = tiles.shape[1] * self._tokens_per_tile
        is_image = input_ids == self._image_token_id
        within = is_image.to(torch.int32).cumsum(1, dtype=torch.int32) - 1
        first = torch.arange(tiles.shape[0], device=tiles.device, dtype=torch.int32) * per_sequence
        # More placeholders than rows is the caller's mistake; it must not read beyond them.
        vision_map = torch.where(is_image, first[:, None] + within.clamp(max=per_sequence - 1), -1)
        vectors, norms = self.text(input_ids, attention_mask, rows, vision_map)
        return vectors, norms


def load_stage(
    model: Model, stage: str, *, layout: str, dtype: str, device: str, max_sequences: int = 1024
) -> StageModule:
    """Build a stage of the model and read its weights, as ``StageFamily.load_stage`` does.

    Raises ``ConfigError``, also for a family without stages.
    """
    family = stages_of(model)

    def load(part: str) -> StageModule:
        return family.load_stage(part, layout=layout, dtype=dtype, device=device, max_sequences=max_sequences)

    if stage != Stage.FUSED:
        return load(stage)
    images = model.vision is not None and model.vision.independent_units
    check_stage(stage, layout, ("vision", *TEXT_STAGES, stage) if images else TEXT_STAGES)
    text, vision = load("text"), load("vision")
    (tiles,), (rows,) = vision.inputs, vision.outputs
    ids = tuple(tensor for tensor in text.inputs if tensor.name in ("input_ids", "attention_mask"))
    module = FusedStage(
        vision.module,
        text.module,
        image_token_id=family.image_token_id,
        tokens_per_tile=int(rows.axes[1]),
    )
    joined = StageTensor(name=tiles.name, dtype=tiles.dtype, axes=("sequences", *tiles.axes))
    return StageModule(module=module.eval(), inputs=(joined, *ids), outputs=text.outputs)


def stages_of(model: Model) -> StageFamily:
    """The model as a family with stages; raises ``ConfigError`` if it has none."""
    if not isinstance(model, StageFamily):
        raise ConfigError(f"model family {model.family} offers no stages to compile or export")
    return model
