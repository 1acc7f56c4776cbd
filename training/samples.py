"""``python -m training.samples``: writes pictures of the world and what they show, for people to look at."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

from training.render.picture import as_jpeg, draw
from training.world.grammar import describe
from training.world.sampling import SHARES, sample

CAPTIONS_FILE = "captions.json"


def write_samples(directory: Path, count: int, seed: int, *, quality: int = 85) -> dict[str, str]:
    """Write ``count`` held-out pictures as JPEG, all kinds in turn; returns the caption of each file name."""
    directory.mkdir(parents=True, exist_ok=True)
    kinds = tuple(SHARES)
    captions: dict[str, str] = {}
    for number in range(count):
        source = random.Random(f"samples {seed} {number}")
        kind = kinds[number % len(kinds)]
        composition = sample(source, held_out=True, kind=kind)
        name = f"{kind}-{number // len(kinds) + 1:02}.jpg"
        (directory / name).write_bytes(as_jpeg(draw(composition, source), quality))
        captions[name] = describe(composition, source)
    written = json.dumps(captions, indent=2, sort_keys=True)
    (directory / CAPTIONS_FILE).write_text(written + "\n", encoding="utf-8")
    return captions


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.samples", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for name, caption in sorted(write_samples(options.out, options.count, options.seed).items()):
        print(f"{name}: {caption}")


if __name__ == "__main__":
    main()
