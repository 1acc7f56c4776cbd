"""``tessera-sizing``: how many workers of each kind a mix of traffic needs, and what they cost.

    tessera-sizing --text 500@128 --images 40@7+4 --hits 0.3 --gpu-hour 2.50

The model is the time that an engine is busy. A sequence of L tokens takes the text engine t(L), a straight
line between the lengths that were measured; a tile takes the vision engine one over its rate. An image of n
tiles is a sequence of 256 n tokens and its text, and on a miss of the cache n tiles as well. A worker is
planned to be busy for a share of the time, since queues grow without bound as that nears 1.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import msgspec
import yaml

from tessera.errors import ConfigError, TesseraError
from tessera.settings import convert

TOKENS_PER_TILE = 256

_NUMBER = r"\d+(?:\.\d*)?|\.\d+"


class Rates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one worker of each kind was measured to do.

    ``tiles`` are tiles a second in full batches; ``sequences`` maps a length in tokens to sequences a second,
    each in full batches; ``shared`` is the share of both that two processes on one card keep.
    """

    source: str
    tiles: float
    sequences: dict[int, float]
    shared: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.tiles < math.inf or len(self.sequences) < 2 or not 0 < self.shared <= 1:
            raise ValueError(
                "tiles must be positive, sequences have two lengths or more, shared be in (0, 1]"
            )
        if any(length < 1 or not 0 < rate < math.inf for length, rate in self.sequences.items()):
            raise ValueError("lengths and rates of sequences must be positive")

    def sequence_seconds(self, tokens: float) -> float:
        """How long the text engine is busy with one sequence; beyond the ends the nearest line goes on."""
        lengths = sorted(self.sequences)
        right = min(max(bisect_right(lengths, tokens), 1), len(lengths) - 1)
        low, high = lengths[right - 1], lengths[right]
        fast, slow = 1 / self.sequences[low], 1 / self.sequences[high]
        line = fast + (slow - fast) * (tokens - low) / (high - low)
        # Short sequences have the least tokens, not the least work for each.
        return max(line, fast * tokens / low) if tokens < low else line


H100 = Rates(
    source="benchmarks/RESULTS.md: one H100, torch engines in bfloat16 with quack-kernels, 2026-11-21",
    tiles=533.0,
    sequences={32: 10279.0, 128: 2548.0, 1024: 293.0},
    shared=0.98,
)


class Text(msgspec.Struct, frozen=True):
    """``rate`` inputs a second of ``tokens`` tokens each, prompt prefix included."""

    rate: float
    tokens: int


class Images(msgspec.Struct, frozen=True):
    """``rate`` inputs a second of ``tiles`` tiles (thumbnail included) and ``tokens`` tokens each."""

    rate: float
    tiles: int
    tokens: int


class Demand(msgspec.Struct, frozen=True):
    """Seconds of work that arrive each second; with ``inputs`` of them."""

    encode: float
    embed: float
    inputs: float


class Plan(msgspec.Struct, frozen=True):
    """Workers of each kind, and the aggregated workers that would do the same."""

    encode: int
    embed: int
    aggregated: int


def demand(rates: Rates, texts: Sequence[Text], images: Sequence[Images], hits: float) -> Demand:
    """``hits`` is the share of images whose rows are in a cache already."""
    embed = sum(text.rate * rates.sequence_seconds(text.tokens) for text in texts)
    for image in images:
        embed += image.rate * rates.sequence_seconds(TOKENS_PER_TILE * image.tiles + image.tokens)
    tiles = sum(image.rate * image.tiles for image in images) * (1 - hits)
    inputs = sum(text.rate for text in texts) + sum(image.rate for image in images)
    return Demand(tiles / rates.tiles, embed, inputs)


def plan(work: Demand, busy: float) -> Plan:
    """``busy`` is the share of the time that a worker is planned to work."""
    return Plan(
        _workers(work.encode, busy), _workers(work.embed, busy), _workers(work.encode + work.embed, busy)
    )


def _workers(seconds: float, busy: float) -> int:
    # A little less than a whole worker must not become two through rounding.
    return math.ceil(round(seconds / busy, 9))


def _text(value: str) -> Text:
    found = re.fullmatch(rf"({_NUMBER})@(\d+)", value)
    if not found or float(found[1]) <= 0 or int(found[2]) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not RATE@TOKENS, such as 500@128")
    return Text(float(found[1]), int(found[2]))


def _images(value: str) -> Images:
    found = re.fullmatch(rf"({_NUMBER})@(\d+)(?:\+(\d+))?", value)
    if not found or float(found[1]) <= 0 or int(found[2]) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not RATE@TILES+TOKENS, such as 40@7+4")
    return Images(float(found[1]), int(found[2]), int(found[3] or 0))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tessera-sizing", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--text", type=_text, action="append", default=[], metavar="RATE@TOKENS", help="texts a second"
    )
    parser.add_argument(
        "--images",
        type=_images,
        action="append",
        default=[],
        metavar="RATE@TILES+TOKENS",
        help="images a second; a page scan has 7 tiles, a 512x512 picture 1",
    )
    parser.add_argument("--hits", type=float, default=0.0, help="share of the images that are in a cache")
    parser.add_argument("--busy", type=float, default=0.7, help="share of the time that workers should work")
    parser.add_argument("--rates", type=Path, help="YAML file with your own measured rates")
    parser.add_argument("--gpu-hour", type=float, default=0.0, help="price of one GPU for an hour")
    parsed = parser.parse_args(argv)
    if not parsed.text and not parsed.images:
        parser.error("give --text or --images, or both")
    if not 0 <= parsed.hits <= 1 or not 0 < parsed.busy <= 1 or not 0 <= parsed.gpu_hour < math.inf:
        parser.error("--hits is from 0 to 1, --busy above 0 and at most 1, --gpu-hour not negative")
    return parsed


def _read(path: Path) -> Rates:
    try:
        return convert(Rates, yaml.safe_load(path.read_text()), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error


def report(rates: Rates, work: Demand, busy: float, gpu_hour: float) -> str:
    """What the command prints; prices in the currency of ``gpu_hour``."""
    workers = plan(work, busy)
    whole = workers.encode + workers.embed
    # Each card does what both stages ask for, a little slower than one process alone would.
    cards = _workers((work.encode + work.embed) / rates.shared, busy) if workers.encode else whole
    lines = [
        f"rates: {rates.source}",
        f"work each second: {work.encode:.2f} s of encoding, {work.embed:.2f} s of embedding",
        f"encode workers: {workers.encode}",
        f"embed workers: {workers.embed}",
    ]
    if workers.encode:
        lines.append(f"ratio: 1 encode worker to {work.embed / work.encode:.2f} embed workers")
    lines.append(f"GPUs: {whole} with one for each worker, {workers.aggregated} with aggregated workers")
    if workers.encode and cards < whole:
        lines.append(f"      {cards} with one encode and one embed worker on each, under MPS")
    if gpu_hour:
        fewest = min(whole, workers.aggregated, cards)
        for name, count in (("one GPU for each worker", whole), ("the fewest GPUs", fewest)):
            cost = count * gpu_hour
            lines.append(
                f"cost, {name}: {cost:.2f} an hour, {cost / work.inputs / 3600 * 1e6:.2f} a million inputs"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parsed = _parse(argv)
    try:
        rates = _read(parsed.rates) if parsed.rates else H100
    except TesseraError as error:
        print(f"tessera-sizing: {error}", file=sys.stderr)
        return 1
    work = demand(rates, parsed.text, parsed.images, parsed.hits)
    print(report(rates, work, parsed.busy, parsed.gpu_hour))
    return 0


if __name__ == "__main__":
    sys.exit(main())
