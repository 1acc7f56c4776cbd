"""The half of a ``Model`` that a family without images has nothing to say about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from tessera.errors import ConfigError, InvalidInput
from tessera.imaging import Picture
from tessera.models.base import Empty, ImagePlan, Int32Array, Pixels, VisionModule, sequential

if TYPE_CHECKING:
    from tessera.models.base import VisionSpec


class TextOnly:
    """Base of families that read text alone, with one position for each token."""

    @property
    def family(self) -> str:
        raise NotImplementedError

    @property
    def vision(self) -> VisionSpec | None:
        return None

    def plan(self, width: int, height: int, *, param: str) -> ImagePlan:
        """Raises ``InvalidInput``."""
        self._refuse(param)

    def preprocess(self, picture: Picture, empty: Empty = np.empty) -> Pixels:
        """Raises ``InvalidInput``."""
        self._refuse(picture.param)

    def vision_index(self, tokens: Int32Array) -> Int32Array:
        return np.empty(0, np.int32)

    def positions(self, tokens: Int32Array, images: Sequence[ImagePlan]) -> Int32Array:
        return sequential(len(tokens))

    def unit_positions(self, image: ImagePlan) -> Int32Array:
        return np.empty((0, image.units), np.int32)

    def load_vision(self, *, dtype: str, device: str) -> VisionModule:
        """Raises ``ConfigError``."""
        raise ConfigError(f"{self.family} reads text alone: it has no vision stage")

    def vision_nbytes(self, dtype: str) -> int:
        return 0

    def vision_activation_nbytes(self, dtype: str, units: int) -> int:
        return 0

    def _refuse(self, param: str) -> NoReturn:
        raise InvalidInput(f"{param} is an image; {self.family} reads text alone", param=param)
