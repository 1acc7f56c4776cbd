"""``python -m benchmarks.kserve``: NVIDIA's perf_analyzer over gRPC, beside ``/v1/embeddings``.

Both get the same rows: distinct ones, padded to one length, with masks, and with ``--images`` a tile of
random pixels and its placeholders each. ``/v1/embeddings`` takes image files, so there a row is a JPEG of one
tile beside as many tokens of text. All caches are off. What was computed is printed beside each rate: a row
that a cache, or an empty mask, answers would measure nothing. ``--write FILE`` only writes the data file of
perf_analyzer.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import csv
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import httpx
import numpy as np
import numpy.typing as npt
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import cpu, usage
from benchmarks.checkpoint import add_model, made_checkpoint, usual_units
from benchmarks.ports import free_ports
from benchmarks.service import NAME, Deployment, service
from tessera.models import Model, open_model
from tessera_tools.load.bodies import jpeg
from tessera_tools.load.words import CheckpointWords
from tessera_tools.table import number, table, write_csv

HEADER: Final = (
    "client", "at once", "rows/s", "p50 ms", "p99 ms", "frontend ms/row", "worker ms/row",
    "rows", "tokens", "tiles",
)  # fmt: skip
_LEAST_ROWS: Final = 256
# Of an image and what stands around it, at most.
_IMAGE_TOKENS: Final = 272


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """``ids`` and ``mask`` int64 ``[rows, tokens]``; ``pixels`` float32 ``[rows, *unit_shape]``, if any."""

    ids: npt.NDArray[np.int64]
    mask: npt.NDArray[np.int64]
    pixels: npt.NDArray[np.float32] | None = None

    @property
    def lengths(self) -> list[int]:
        return [int(count) for count in self.mask.sum(axis=1)]


def make_rows(model: Model, *, count: int, tokens: int, least: int, images: bool, seed: int = 0) -> Rows:
    """Distinct rows of ``least`` to ``tokens`` random tokens; none but an image's is a placeholder."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(1000 % model.vocab_size, model.vocab_size, (count, tokens))
    placeholder = getattr(model, "image_token_id", -1)
    ids[ids == placeholder] = (placeholder + 1) % model.vocab_size
    lengths = generator.integers(least, tokens + 1, count)
    mask = (np.arange(tokens) < lengths[:, None]).astype(np.int64)
    pixels = None
    if images:
        assert model.vision is not None
        rows = model.vision.rows(1)
        if least <= rows:
            raise SystemExit(f"--least {least}: an image alone takes {rows} tokens")
        ids[:, 1 : 1 + rows] = placeholder
        pixels = generator.standard_normal((count, *model.vision.unit_shape), np.float32)
    return Rows(ids=ids * mask, mask=mask, pixels=pixels)


def write_data(rows: Rows, path: Path) -> None:
    """As ``--input-data`` of perf_analyzer reads it, a row at a time: images take a gigabyte."""

    def tensor(values: npt.NDArray[np.float32] | npt.NDArray[np.int64]) -> dict[str, object]:
        written = base64.b64encode(np.ascontiguousarray(values)).decode()
        return {"content": {"b64": written}, "shape": list(values.shape)}

    with path.open("w") as file:
        file.write('{"data":[')
        for index in range(len(rows.ids)):
            one = {"input_ids": tensor(rows.ids[index]), "attention_mask": tensor(rows.mask[index])}
            if rows.pixels is not None:
                one["pixel_values"] = tensor(rows.pixels[index])
            file.write(("," if index else "") + json.dumps(one))
        file.write("]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """``seconds`` of a window in which ``rows`` were answered; latencies in milliseconds."""

    rows: int
    rate: float
    p50: float
    p99: float


def perf_analyzer(
    command: str,
    address: str,
    data: Path,
    *,
    at_once: int,
    out: Path,
    seconds: float = 1,
    answers: int = 0,
    metrics: str = "",
) -> Point:
    """Measure one concurrency, as MISSION's tables were; raises ``SystemExit`` with what it said.

    A window lasts ``seconds``, or with ``answers`` until there are as many.
    """
    arguments = [command, "-m", "router", "-i", "grpc", "-u", address, "-b", "1"]
    arguments += ["--input-data", str(data), "--concurrency-range", str(at_once)]
    arguments += ["--measurement-interval", str(int(seconds * 1000)), "-f", str(out), "--verbose-csv"]
    if answers:
        arguments += ["--measurement-mode", "count_windows", "--measurement-request-count", str(answers)]
    # As many windows as there are without looking for three alike.
    arguments += ["--stability-percentage", "999", "--max-trials", "3"]
    if metrics:
        arguments += ["--collect-metrics", "--metrics-url", metrics]
    ran = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise SystemExit(f"perf_analyzer: {ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    (row,) = csv.DictReader(out.read_text().splitlines())
    found = next(line for line in ran.stdout.splitlines() if "Request count:" in line)
    return Point(
        rows=int(found.rpartition(":")[2]),
        rate=float(row["Inferences/Second"]),
        p50=float(row["p50 latency"]) / 1e3,
        p99=float(row["p99 latency"]) / 1e3,
    )


def bodies_of(rows: Rows, model_path: Path) -> list[bytes]:
    """The rows for ``/v1/embeddings``."""
    if rows.pixels is None:
        return [
            _json(input=[ids[:length].tolist()]) for ids, length in zip(rows.ids, rows.lengths, strict=True)
        ]
    generator, words = np.random.default_rng(0), CheckpointWords(model_path).all()
    bodies = []
    for length, pixels in zip(rows.lengths, rows.pixels, strict=True):
        size = pixels.shape[-1]
        small = generator.integers(0, 256, (size // 16, size // 16, 3), dtype=np.uint8)
        tile = Image.fromarray(small).resize((size, size), Image.Resampling.BICUBIC)
        url = "data:image/jpeg;base64," + base64.b64encode(jpeg(tile)).decode()
        text = " ".join(generator.choice(words, max(1, length - _IMAGE_TOKENS)))
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
        bodies.append(_json(messages=[{"role": "user", "content": parts}]))
    return bodies


def _json(**value: object) -> bytes:
    return json.dumps({"model": NAME, "encoding_format": "base64", **value}).encode()


async def ask(url: str, bodies: Sequence[bytes], at_once: int, seconds: float) -> Point:
    latencies: list[float] = []
    turns: Iterator[bytes] = itertools.cycle(bodies)
    start = time.perf_counter()
    end = start + seconds
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=at_once)) as client:

        async def loop() -> None:
            while time.perf_counter() < end:
                begun = time.perf_counter()
                headers = {"content-type": "application/json"}
                async with client.post(f"{url}/v1/embeddings", data=next(turns), headers=headers) as answer:
                    answer.raise_for_status()
                    await answer.read()
                latencies.append(time.perf_counter() - begun)

        await asyncio.gather(*(loop() for _ in range(at_once)))
        # The last answers come behind the end.
        seconds = time.perf_counter() - start
    p50, p99 = np.quantile(latencies, (0.5, 0.99)) * 1e3
    return Point(rows=len(latencies), rate=len(latencies) / seconds, p50=float(p50), p99=float(p99))


def computed(url: str) -> dict[str, int]:
    """Rows, and tokens of texts and of images that workers had to compute, so far."""
    found = {"text": 0, "image": 0, "cached": 0, "rows": 0}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            if sample.name == "tessera_tokens_total":
                found[sample.labels["kind"]] += int(sample.value)
            elif sample.name == "tessera_inputs_total":
                found["rows"] += int(sample.value)
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = usage.parser("benchmarks.kserve", __doc__)
    add_model(parser)
    parser.add_argument("--perf", default="perf_analyzer", help="`scripts/clients perf` makes bin/perf")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the data file and end")
    parser.add_argument("--mode", choices=("agg", "e_p"), default="agg")
    parser.add_argument("--frontends", type=int, default=1)
    parser.add_argument("--images", action="store_true", help="a tile in each row")
    parser.add_argument("--rows", type=int, default=_LEAST_ROWS, help="distinct ones")
    parser.add_argument("--tokens", type=int, default=1024, help="that rows are padded to")
    parser.add_argument("--least", type=int, default=1024, help="tokens of the shortest row")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[8, 12, 16, 24, 28, 32])
    parser.add_argument("--seconds", type=float, default=10.0, help="of a window")
    parser.add_argument("--out", type=Path, default=Path("benchmarks-out"), help="CSV and logs")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        path = made_checkpoint(options, Path(folder))
        model = open_model(path)
        rows = make_rows(
            model,
            count=max(_LEAST_ROWS, options.rows),
            tokens=options.tokens,
            least=min(options.least, options.tokens),
            images=options.images,
        )
        data = options.write or Path(folder, "rows.json")
        write_data(rows, data)
        if options.write is not None:
            print(f"{len(rows.ids)} rows, {sum(rows.lengths)} tokens in them: {data}")
            return 0
        options.out.mkdir(parents=True, exist_ok=True)
        (port,) = free_ports(1)
        units = usual_units(model)
        deployment = Deployment(
            model_path=path,
            mode=options.mode,
            frontends=options.frontends,
            engine={"vision": {"max_batch_cost": units}, "text": {"max_batch_cost": 16384}},
            worker_flags=("--multimodal-embedding-cache-capacity-gb", "0"),
            frontend_flags=("--max-in-flight", "100000", "--grpc-port", str(port)),
        )
        written: list[tuple[str, ...]] = []
        with service(deployment, options.out / "logs") as (url, *_):
            bodies = bodies_of(rows, path)
            clients = ("perf_analyzer", "/v1/embeddings")
            asked = [(client, at_once) for client in clients for at_once in options.concurrency]
            for client, at_once in asked:
                meter, before = cpu.Meter(), computed(url)
                meter.begin()
                if client == "perf_analyzer":
                    found = perf_analyzer(
                        options.perf,
                        f"127.0.0.1:{port}",
                        data,
                        at_once=at_once,
                        seconds=options.seconds,
                        out=options.out / f"perf-{at_once}.csv",
                    )
                else:
                    found = asyncio.run(ask(url, bodies, at_once, options.seconds))
                meter.end()
                after = computed(url)
                spent = {name: after[name] - before[name] for name in after}
                # perf_analyzer's count is that of its windows, and it asks before and between them, too.
                answered = max(1, spent["rows"])
                per_row = [
                    1e3 * (meter.cores(*names) or 0.0) * meter.seconds / answered
                    for names in (("frontend",), cpu.WORKERS)
                ]
                image_tokens = spent["image"] - spent["cached"]
                tiles = image_tokens // model.vision.rows(1) if model.vision is not None else 0
                tokens = str(spent["text"] + image_tokens)
                line = (client, str(at_once), *map(number, (found.rate, found.p50, found.p99, *per_row)))
                written.append((*line, str(spent["rows"]), tokens, str(tiles)))
                print(*written[-1], sep="  ", file=sys.stderr)
        print(table(HEADER, written))
        write_csv(options.out / "kserve.csv", HEADER, written)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
