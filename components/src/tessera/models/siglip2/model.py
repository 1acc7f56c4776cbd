"""A checkpoint of SigLIP 2 NaFlex as the rest of Tessera sees it; importing and opening need no torch.

An image becomes a grid of patches of its own aspect ratio, padded to the most that there may be.
"""

from __future__ import annotations

from math import isqrt
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np

from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.errors import ConfigError
from tessera.imaging import Picture
from tessera.models.base import Empty, Family, ImagePlan, Int32Array, Pixels
from tessera.models.options import OptionsFamily
from tessera.models.siglip.model import SiglipTexts, Texts, read_text, read_vision
from tessera.models.siglip2.patches import cut, grid_of
from tessera.models.two_towers.config import tower_section
from tessera.models.two_towers.images import HALF, check_same, read_processing, read_processor
from tessera.nn.spec import CHANNELS

# Fewer are too few for the narrowest strip that there may be.
_LEAST: Final = 16


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``max_num_patches`` bounds the grid of an image; 0: as the checkpoint's processor says.

    ``texts`` is as of SigLIP.
    """

    max_num_patches: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0
    texts: Texts = "auto"


class Siglip2(SiglipTexts):
    """Implements ``tessera.models.base.Model``."""

    family = "siglip2"
    vision_class = "tessera.models.siglip2.vision:Siglip2Vision"

    def __init__(self, path: Path, options: Options) -> None:
        """Read configuration and tokenizer; the weights are not looked at.

        Raises ``CheckpointError``, and ``ConfigError`` for too few patches.
        """
        config = Section.read(path / CONFIG_FILE)
        text, processor = read_text(config), read_processor(path)
        section = tower_section(config, "vision_config")
        positions = section.integer("num_patches", 256)
        if isqrt(positions) ** 2 != positions:
            raise section.error("num_patches", f"must be a square, not {positions}")
        patch = section.integer("patch_size", 16)
        check_same(processor, "patch_size", patch, default=16)
        vision = read_vision(section, patch=patch, grid=isqrt(positions))
        processing = read_processing(processor, resample=2, mean=HALF, std=HALF)
        tokenizer = self.read_tokenizer(path, text, options.texts)
        super().__init__(path, text, vision, processing, options, tokenizer=tokenizer)
        self._most = options.max_num_patches or processor.integer("max_num_patches", 256, at_least=_LEAST)
        if self._most < _LEAST:
            raise ConfigError(f"model option max_num_patches {self._most} is below {_LEAST}")

    @property
    def unit_shape(self) -> tuple[int, ...]:
        patch = self.config.patch_size
        return self._most, CHANNELS, patch, patch

    @property
    def patches(self) -> int:
        return self._most

    def plan(self, width: int, height: int, *, param: str) -> ImagePlan:
        rows, columns = grid_of(width, height, patch=self.config.patch_size, most=self._most)
        return ImagePlan(units=1, rows=1, grid=(1, rows, columns))

    def unit_positions(self, image: ImagePlan) -> Int32Array:
        """int32 ``[2, 1]``: rows and columns of the image's grid."""
        _, rows, columns = image.grid or (1, self.config.grid, self.config.grid)
        return np.array([[rows], [columns]], np.int32)

    def preprocess(self, picture: Picture, empty: Empty = np.empty) -> Pixels:
        plan = self.plan(*picture.size, param=picture.param)
        assert plan.grid is not None
        patches = cut(
            picture,
            plan.grid[1:],
            patch=self.config.patch_size,
            most=self._most,
            resample=self.processing.resample,
            empty=empty,
        )
        return Pixels(values=patches, plan=plan)

    @property
    def patch_shape(self) -> tuple[int, ...]:
        return (self.config.patch_features,)


FAMILY: Family = OptionsFamily(
    model_types=("siglip2",),
    hub_models=("google/siglip2-base-patch16-naflex", "google/siglip2-so400m-patch16-naflex"),
    options=Options,
    opened=Siglip2,
    architectures=("Siglip2Model",),
)
