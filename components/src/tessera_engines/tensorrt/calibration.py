"""Inputs to calibrate float8 with: a directory of images and texts, or random ones if none is named."""

from __future__ import annotations

import numpy as np

from tessera.engine.base import vision_of
from tessera.errors import ConfigError
from tessera.models.base import Content, Model, Role
from tessera_engines.calibration import Calibration, prompt_tokens
from tessera_engines.compiled.spec import BuildSpec, Stage
from tessera_engines.networks.graph import Samples

_RANDOM_TILES = 4
_RANDOM_LENGTHS = (16, 64, 256)


def read_samples(model: Model, spec: BuildSpec) -> tuple[Samples, str]:
    """Read ``spec.calibration``; returns samples and a note, both empty unless the dtype is float8."""
    if spec.dtype != "float8":
        return Samples(), ""
    if spec.calibration is None:
        return _random(model), "random tiles and tokens: name a directory of real ones before serving"
    source = Calibration.read(spec.calibration)
    tiles = [tile for picture in source.pictures() for tile in model.preprocess(picture).values]
    tokens = [
        prompt_tokens(model, Content(parts=(line,), role=Role.PASSAGE), where)
        for where, line in source.lines.items()
    ]
    if not tiles and spec.stage in (Stage.VISION, Stage.FUSED):
        raise ConfigError(f"{spec.calibration}: holds no image to calibrate the {spec.stage} stage with")
    if not tokens and spec.stage is not Stage.VISION:
        raise ConfigError(f"{spec.calibration}: holds no .txt file to calibrate the {spec.stage} stage with")
    return (
        Samples(tiles=tiles, tokens=tokens),
        f"{len(tiles)} tiles and {len(tokens)} lines of text from {spec.calibration.name}",
    )


def _random(model: Model) -> Samples:
    chance = np.random.default_rng(0)
    channels, height, width = vision_of(model).unit_shape
    tiles = []
    for number in range(_RANDOM_TILES):
        # From smooth to noisy: blocks of one colour, smaller in each tile.
        block = 64 >> (2 * number) or 1
        coarse = chance.integers(0, 256, (channels, -(-height // block), -(-width // block)), dtype=np.uint8)
        tiles.append(coarse.repeat(block, 1).repeat(block, 2)[:, :height, :width])
    lengths = [min(length, model.max_tokens) for length in _RANDOM_LENGTHS]
    return Samples(
        tiles=tiles,
        tokens=[chance.integers(0, model.vocab_size, length, dtype=np.int32) for length in lengths],
    )
