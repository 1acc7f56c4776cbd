"""``tessera sizing``: how many workers of each kind a mix of traffic needs, and what they cost.

    tessera sizing --text 500@128 --images 40@7+4 --hits 0.3 --gpu-hour 2.50

The model is the time that an engine is busy. A sequence of L tokens takes the text engine t(L), a straight
line between the lengths that were measured; a unit of an image takes the vision engine one over its rate. An
image is a sequence of its vision rows and its text, and on a miss of the cache its units as well. A worker is
planned to be busy for a share of the time, since queues grow without bound as that nears 1.

A unit is what the family's plan of an image counts: a tile of llama_nemotron_vl, a patch of 16 by 16 pixels
of qwen3_vl_embedding. A family that reads text alone has no rate of units. A pair of a reranker is one input.
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

from tessera.command import OneLineParser
from tessera.errors import ConfigError, TesseraError
from tessera.flags import convert
from tessera.small_files import read_yaml, why_unread

_NUMBER = r"\d+(?:\.\d*)?|\.\d+"


class Rates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one worker of each kind was measured to do.

    ``sequences`` maps a length in tokens to sequences a second, each in full batches; ``units`` are units of
    images a second, likewise, and ``rows_per_unit`` the vision rows that one becomes; ``shared`` is the share
    of both rates that two processes on one card keep.
    """

    source: str
    sequences: dict[int, float]
    units: float | None = None
    rows_per_unit: float | None = None
    shared: float = 1.0

    def __post_init__(self) -> None:
        if len(self.sequences) < 2 or not 0 < self.shared <= 1:
            raise ValueError("sequences must have two lengths or more, shared be in (0, 1]")
        if (self.units is None) != (self.rows_per_unit is None):
            raise ValueError("units and rows_per_unit go together")
        if any(rate is not None and not 0 < rate < math.inf for rate in (self.units, self.rows_per_unit)):
            raise ValueError("units and rows_per_unit must be positive")
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


H200 = Rates(
    source="benchmarks/RESULTS.md: llama_nemotron_vl on one H200, bfloat16 with quack-kernels, 2026-11-24",
    units=560.0,
    rows_per_unit=256.0,
    sequences={32: 10446.0, 128: 2602.0, 1024: 297.0},
    shared=0.98,
)


class Text(msgspec.Struct, frozen=True):
    """``rate`` inputs a second of ``tokens`` tokens each, prompt prefix included."""

    rate: float
    tokens: int


class Images(msgspec.Struct, frozen=True):
    """``rate`` inputs a second of one image of ``units`` units and ``tokens`` tokens beside it each."""

    rate: float
    units: int
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
    """``hits`` is the share of images whose rows are in a cache already.

    Raises ``ConfigError`` for images and rates of a family that reads text alone.
    """
    embed = sum(text.rate * rates.sequence_seconds(text.tokens) for text in texts)
    encode = 0.0
    for image in images:
        if rates.units is None or rates.rows_per_unit is None:
            raise ConfigError(f"rates: {rates.source}: images need units and rows_per_unit, which it lacks")
        embed += image.rate * rates.sequence_seconds(rates.rows_per_unit * image.units + image.tokens)
        encode += image.rate * image.units / rates.units * (1 - hits)
    inputs = sum(text.rate for text in texts) + sum(image.rate for image in images)
    return Demand(encode, embed, inputs)


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
        raise argparse.ArgumentTypeError(f"{value!r} is not RATE@UNITS+TOKENS, such as 40@7+4")
    return Images(float(found[1]), int(found[2]), int(found[3] or 0))


def _parse(argv: Sequence[str] | None, prog: str) -> argparse.Namespace:
    said = "How many workers of each kind a mix of traffic needs, and what they cost."
    parser = OneLineParser(prog=prog, description=said)
    parser.add_argument(
        "--text", type=_text, action="append", default=[], metavar="RATE@TOKENS", help="texts a second"
    )
    parser.add_argument(
        "--images",
        type=_images,
        action="append",
        default=[],
        metavar="RATE@UNITS+TOKENS",
        help="images a second, of how many units each: by the default rates a page scan has 7",
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
        return convert(Rates, read_yaml(path), str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {why_unread(error)}") from error


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


def main(argv: Sequence[str] | None = None, prog: str = "tessera-sizing") -> int:
    parsed = _parse(argv, prog)
    try:
        rates = _read(parsed.rates) if parsed.rates else H200
        work = demand(rates, parsed.text, parsed.images, parsed.hits)
    except TesseraError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    print(report(rates, work, parsed.busy, parsed.gpu_hour))
    return 0


if __name__ == "__main__":
    sys.exit(main())
