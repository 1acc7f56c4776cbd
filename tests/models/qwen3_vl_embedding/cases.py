"""Inputs that tell a right forward pass from a wrong one: lengths, numbers of images, grids, orders."""

from __future__ import annotations

from tests.models.qwen3_vl_embedding.pictures import picture
from tests.models.running import Given

WORDS = "the river under the bridge by the old temple and a market in the light of morning "

SMALL, WIDE, TALL = picture(64, 64, seed=1), picture(200, 90, seed=2), picture(90, 333, seed=3)
LARGE, STRIP = picture(500, 400, seed=4), picture(900, 40, seed=5)

CASES = {
    "one word": Given(parts=("river",)),
    "a question": Given(parts=("What is shown in the picture?",), instruction="Find the page that answers."),
    "200 words": Given(parts=(WORDS * 11,)),
    "one image": Given(parts=(WIDE,)),
    "the smallest image": Given(parts=(SMALL,)),
    "image, text": Given(parts=(LARGE, "a picture of waves")),
    "text, image": Given(parts=("a picture of waves", LARGE)),
    "text between two": Given(parts=("first", TALL, "then", WIDE, "last")),
    "two alike": Given(parts=(TALL, TALL), instruction="Compare both"),
    "three in a row": Given(parts=(STRIP, SMALL, TALL)),
    "five interleaved": Given(parts=(SMALL, "one", WIDE, "two", TALL, "three", STRIP, "four", LARGE, WORDS)),
}
"""Each a prompt of up to some hundred tokens."""

LONG = Given(parts=(WORDS * 150, LARGE, WORDS * 200, WIDE, "last"))
"""Close to the longest input that the reference takes."""
