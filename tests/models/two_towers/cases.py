"""Inputs that tell a right forward pass from a wrong one: lengths, scripts, shapes of images."""

from __future__ import annotations

from tests.models.qwen3_vl_embedding.pictures import picture
from tests.models.running import Given

TEXTS = [
    "a",
    "river",
    "A photo of a Temple",
    "été naïve 東京 \U0001f600",
    "the river under the bridge by the old temple",
    "the old market, in the light of morning: which price had a garden?",
]

IMAGES = {
    "square": picture(64, 64, seed=1),
    "wide": picture(200, 90, seed=2),
    "tall": picture(90, 333, seed=3),
    "large": picture(500, 400, seed=4),
    "strip": picture(900, 40, seed=5),
    "small": picture(17, 23, seed=6),
}

CASES = [
    *(Given(parts=(text,)) for text in TEXTS),
    Given(parts=("two texts ", "are one")),
    *(Given(parts=(image,)) for image in IMAGES.values()),
]
