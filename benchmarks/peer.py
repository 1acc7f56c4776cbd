"""``python -m benchmarks.peer``: the service beside a peer, on the same inputs, in the same run.

``transformers`` runs in this process, in padded batches; ``vllm`` is started as a server where it is
installed and gets the same HTTP bodies; a URL is a server that runs already. Each has the machine to itself
while it is measured. Answers of ``transformers`` are compared with the service's.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks import http, usage
from benchmarks.bodies import WORKLOADS, Bodies, Body, HttpWorkload
from benchmarks.checkpoint import made_checkpoint, usual_units
from benchmarks.load import Outcome, drive
from benchmarks.service import service
from benchmarks.table import number, table, write_csv
from tessera.models import open_model

HEADER = ("workload", "at once", "service, inputs/s", "peer, inputs/s", "ratio", "worst cosine")
_USUAL = ("text-1024", "text-128", "text-32x64", "tile", "page", "tile-again")
Item = tuple[str, bytes | None]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    if options.peer == "vllm" and importlib.util.find_spec("vllm") is None:
        raise SystemExit("--peer vllm: vLLM is not installed here; name the URL of a server instead")
    workloads = [(WORKLOADS[name], loop) for name, loop in options.workloads]
    with tempfile.TemporaryDirectory() as folder:
        options.model_path = made_checkpoint(options, Path(folder))
        options.units = options.units or usual_units(open_model(options.model_path))
        options.out.mkdir(parents=True, exist_ok=True)
        own: list[Outcome] = []
        answers: list[npt.NDArray[np.float32]] = []
        with service(http.deployment(options), options.out / "logs") as urls:
            for workload, loop in workloads:
                own.append(drive(http.load(options), urls, workload, float(loop)))
                answers.append(_vectors(urls[0], _sample(options, workload)))
        if options.peer == "transformers":
            theirs, cosines = _transformers(options, [workload for workload, _ in workloads], answers)
        else:
            theirs, cosines = _server(options, workloads), [None] * len(workloads)
    rows = []
    for (workload, loop), mine, rate, cosine in zip(workloads, own, theirs, cosines, strict=True):
        ours = mine.inputs / options.seconds
        if mine.errors:
            raise SystemExit(f"{workload.name}: {mine.errors}")
        rows.append(
            (
                workload.name,
                str(loop),
                number(ours),
                number(rate),
                number(ours / rate),
                "-" if cosine is None else f"{cosine:.5f}",
            )
        )
    print(f"peer: {options.peer}\n" + table(HEADER, rows))
    write_csv(options.out / "peer.csv", HEADER, rows)
    return 0


def _transformers(
    options: argparse.Namespace, workloads: Sequence[HttpWorkload], answers: Sequence[npt.NDArray[np.float32]]
) -> tuple[list[float], list[float | None]]:
    import torch

    from benchmarks.transformers_peer import TransformersPeer

    on_card = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_card else ("cpu", torch.float32)
    peer = TransformersPeer(options.model_path, device=device, dtype=dtype)
    rates, cosines = [], []
    for workload, answer in zip(workloads, answers, strict=True):
        sample = _items(_sample(options, workload))
        found = peer.embed(sample)
        cosines.append(float((found * answer[: len(found)]).sum(axis=1).min()))
        batches = _batches(options, workload)
        peer.embed(next(batches))
        count, started = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < options.seconds:
            count += len(peer.embed(next(batches)))
        rates.append(count / elapsed)
    return rates, list(cosines)


def _batches(options: argparse.Namespace, workload: HttpWorkload) -> Iterator[list[Item]]:
    bodies = iter(Bodies(workload, open_model(options.model_path), options.model_name, seed=2))
    while True:
        items: list[Item] = []
        while len(items) < options.batch:
            items += _items([next(bodies)])
        yield items


def _sample(options: argparse.Namespace, workload: HttpWorkload) -> list[Body]:
    return list(
        islice(Bodies(workload, open_model(options.model_path), options.model_name, seed=3, variety=2), 2)
    )


def _items(bodies: Sequence[Body]) -> list[Item]:
    """What a body asks for: texts and decoded image files."""
    found: list[Item] = []
    for body in bodies:
        request = json.loads(body.data)
        if "input" in request:
            texts = request["input"]
            found += [(text, None) for text in ([texts] if isinstance(texts, str) else texts)]
            continue
        image, text = request["messages"][0]["content"]
        encoded = image["image_url"]["url"].partition(",")[2]
        found.append((text["text"], base64.b64decode(encoded)))
    return found


def _vectors(url: str, bodies: Sequence[Body]) -> npt.NDArray[np.float32]:
    rows = []
    for body in bodies:
        request = urllib.request.Request(
            f"{url}/v1/embeddings", body.data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            data = json.load(answer)["data"]
        rows += [np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in data]
    return np.stack(rows)


def _server(options: argparse.Namespace, workloads: Sequence[tuple[HttpWorkload, int]]) -> list[float]:
    with _running(options) as url:
        rates = []
        for workload, loop in workloads:
            outcome = drive(http.load(options), (url,), workload, float(loop))
            if outcome.errors:
                print(f"{workload.name}: {outcome.errors}", file=sys.stderr)
            rates.append(outcome.inputs / options.seconds)
        return rates


@contextmanager
def _running(options: argparse.Namespace) -> Iterator[str]:
    if options.peer != "vllm":
        yield options.peer
        return
    port = 18_431
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--runner", "pooling"]
    command += ["--model", str(options.model_path), "--served-model-name", options.model_name]
    command += ["--port", str(port), "--host", "127.0.0.1", "--trust-remote-code"]
    with (options.out / "vllm.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 600
        while not _healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"vLLM did not start; see {options.out / 'vllm.log'}")
            time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _workload(value: str) -> tuple[str, int]:
    name, _, loop = value.partition("@")
    if name not in WORKLOADS:
        raise argparse.ArgumentTypeError(f"workload {name!r} is none of: {', '.join(WORKLOADS)}")
    return name, int(loop or 64)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = usage.parser("benchmarks.peer", __doc__)
    parser.add_argument("--peer", default="transformers", help="transformers, vllm or a URL")
    parser.add_argument("--workloads", nargs="*", type=_workload, metavar="NAME[@N]")
    parser.add_argument("--batch", type=int, default=32, help="inputs in a batch of transformers")
    http.add_shared(parser)
    options = parser.parse_args(argv, argparse.Namespace(rate=None, mode="agg"))
    options.workloads = options.workloads or [(name, 64) for name in _USUAL]
    return options


if __name__ == "__main__":
    raise SystemExit(main())
