"""``python -m benchmarks.peer``: the service beside a peer, on the same inputs, in the same run.

``--vllm SITE`` runs, one after the other and from the same client processes, the engines in process, Tessera
as it is tuned here and as it starts with nothing set, and vLLM from the packages in SITE. Rates, latencies,
processors, clock and power of each go to ``peer.csv`` as they come, and vectors of both are compared.
``--parts`` alone runs what needs no vLLM.

Otherwise ``transformers`` runs in this process, in padded batches, or a URL is a server that runs already.
"""

from __future__ import annotations

import argparse
import base64
import json
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks import http, usage, vllm_peer
from benchmarks.checkpoint import made_checkpoint, usual_units
from benchmarks.service import service
from tessera.models import open_model
from tessera_tools.load.bodies import WORKLOADS, Bodies, Body, HttpWorkload
from tessera_tools.load.clients import Outcome, drive
from tessera_tools.load.words import CheckpointWords
from tessera_tools.table import number, table, write_csv

HEADER = ("workload", "at once", "service, inputs/s", "peer, inputs/s", "ratio", "worst cosine")
_USUAL = ("text-1024", "text-128", "text-32x64", "tile", "page", "tile-again")
Item = tuple[str, bytes | None]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    if options.parts:
        return vllm_peer.compare(options)
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
        ours = mine.inputs_rate
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
    bodies = iter(Bodies(workload, CheckpointWords(options.model_path), options.model_name, seed=2))
    while True:
        items: list[Item] = []
        while len(items) < options.batch:
            items += _items([next(bodies)])
        yield items


def _sample(options: argparse.Namespace, workload: HttpWorkload) -> list[Body]:
    words = CheckpointWords(options.model_path)
    return list(islice(Bodies(workload, words, options.model_name, seed=3, variety=2), 2))


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
    rates = []
    for workload, loop in workloads:
        outcome = drive(http.load(options), (options.peer,), workload, float(loop))
        if outcome.errors:
            print(f"{workload.name}: {outcome.errors}", file=sys.stderr)
        rates.append(outcome.inputs_rate)
    return rates


def _workload(value: str) -> tuple[str, int]:
    name, _, loop = value.partition("@")
    if name not in WORKLOADS:
        raise argparse.ArgumentTypeError(f"workload {name!r} is none of: {', '.join(WORKLOADS)}")
    return name, int(loop or 64)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = usage.parser("benchmarks.peer", __doc__)
    parser.add_argument("--peer", default="transformers", help="transformers or a URL")
    parser.add_argument("--vllm", type=Path, metavar="SITE", help="packages of vLLM, for its PYTHONPATH")
    parser.add_argument("--vllm-python", default="python3", help="the interpreter of these packages")
    parser.add_argument(
        "--vllm-command", help="start this instead: a server at {port} that serves {model} as {name}"
    )
    parser.add_argument("--api-servers", type=int, default=6, help="API processes of vLLM")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=vllm_peer.PARTS,
        help="one after the other; several runs may share their --out",
    )
    parser.add_argument(
        "--starts", nargs="+", choices=("tuned", "default"), default=["tuned"], help="of Tessera, with --vllm"
    )
    parser.add_argument(
        "--quantization",
        choices=("fp8",),
        help="of the products of both servers, in half precision or as the checkpoint has them without it",
    )
    parser.add_argument("--limit", type=float, default=1500.0, help="seconds for all parts")
    parser.add_argument("--workloads", nargs="*", type=_workload, metavar="NAME[@N]")
    parser.add_argument("--batch", type=int, default=32, help="inputs in a batch of transformers")
    http.add_shared(parser)
    options = parser.parse_args(argv, argparse.Namespace(rate=None, mode="agg"))
    if options.vllm is not None:
        options.parts = options.parts or ["engine", *options.starts, "vllm"]
    elif options.parts and "vllm" in options.parts:
        parser.error("--parts vllm needs --vllm")
    usual = vllm_peer.USUAL if options.parts else [(name, 64) for name in _USUAL]
    options.workloads = options.workloads or usual
    return options


if __name__ == "__main__":
    # So that `timeout` leaves no server behind: they are in process groups of their own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    raise SystemExit(main())
