"""The finished picture: drawn, worn by noise and scaling, and written as an image file."""

from __future__ import annotations

import random
from functools import cache
from io import BytesIO

import numpy as np
import numpy.typing as npt
from PIL import Image

from training.render.canvas import ANY, Canvases
from training.render.charts import draw_chart, draw_table
from training.render.pages import draw_page
from training.render.scenes import draw_pair, draw_scene
from training.world.compositions import Chart, Composition, Page, Pair, Scene

_NOISE_EDGE = 1024
_FILTERS = (
    Image.Resampling.LANCZOS,
    Image.Resampling.LANCZOS,
    Image.Resampling.BICUBIC,
    Image.Resampling.BOX,
)


def draw(composition: Composition, source: random.Random, canvases: Canvases = ANY) -> Image.Image:
    """An RGB picture of ``composition``, between 1:3 and 3:1, with noise on two in three."""
    match composition:
        case Scene():
            clean = draw_scene(composition, source, canvases)
        case Pair():
            clean = draw_pair(composition, source, canvases)
        case Page():
            clean = draw_page(composition, source, canvases)
        case Chart():
            clean = draw_chart(composition, source, canvases)
        case _:
            clean = draw_table(composition, source, canvases)
    if source.random() < 0.12:
        clean = half_size(clean)
    return clean if source.random() < 0.33 else _noisy(clean, source)


def half_size(image: Image.Image) -> Image.Image:
    return image.resize((max(1, image.width // 2), max(1, image.height // 2)), Image.Resampling.LANCZOS)


def kept(image: Image.Image, source: random.Random) -> Image.Image:
    """The picture as somebody else keeps it: most often halved, else scaled by 0.4 to 0.9."""
    share = 0.5 if source.random() < 0.7 else source.uniform(0.4, 0.9)
    size = max(1, int(image.width * share)), max(1, int(image.height * share))
    return image.resize(size, source.choice(_FILTERS))


def encode(image: Image.Image, source: random.Random) -> bytes:
    """JPEG of quality 40 to 95, or PNG one time in four."""
    if source.random() < 0.25:
        return as_png(image)
    return as_jpeg(image, source.randint(40, 95))


def as_jpeg(image: Image.Image, quality: int) -> bytes:
    buffer = BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def as_png(image: Image.Image) -> bytes:
    buffer = BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _noisy(image: Image.Image, source: random.Random) -> Image.Image:
    strength = source.uniform(2, 14)
    wide = min(image.width, _NOISE_EDGE)
    high = min(image.height, _NOISE_EDGE)
    left, top = source.randint(0, _NOISE_EDGE - wide), source.randint(0, _NOISE_EDGE - high)
    noise = _noise()[top : top + high, left : left + wide]
    pixels = np.asarray(image).astype(np.int16)
    # Powers of two would be cheaper still; the fixed point keeps floats out of a hot loop.
    pixels[:high, :wide] += (noise * np.int16(round(strength * 4))) >> 7
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


@cache
def _noise() -> npt.NDArray[np.int16]:
    """Gaussian noise with a deviation of 32, the same in every process; pictures show different parts."""
    generator = np.random.Generator(np.random.PCG64(7))
    return np.rint(generator.standard_normal((_NOISE_EDGE, _NOISE_EDGE, 3)) * 32).astype(np.int16)
