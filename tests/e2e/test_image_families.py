"""Families whose images keep their shape: aggregated, split by every hand-off, and when workers die."""

from __future__ import annotations

import base64
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tessera.models.base import Role
from tessera.transport.kinds.nixl_agent import nixl_missing
from tessera_tools.random_checkpoint.checkpoint import main as write_checkpoint
from tests.e2e.service import MODEL, Service, launch
from tests.models.qwen3_vl_embedding.cases import LARGE, SMALL, STRIP, TALL, WIDE
from tests.models.running import Given, cosines
from tests.references.families import Reference, reference_of

pytestmark = pytest.mark.service

FAMILIES = ("nemotron_3_5_embed", "nemotron_colembed_vl")
_NO_NIXL = pytest.mark.skipif(nixl_missing() is not None, reason="needs nixl")
WAYS = ["agg", "shm", "inline", pytest.param("nixl", marks=_NO_NIXL)]

Parts = tuple[str | bytes, ...]
INPUTS: tuple[Parts, ...] = (
    ("a yellow heart",),
    (WIDE,),
    (SMALL, "a market in the light of morning"),
    (TALL, WIDE, TALL),
    (SMALL, "one ", WIDE, "two", STRIP, TALL, LARGE),
)
IMAGES = {part for parts in INPUTS for part in parts if isinstance(part, bytes)}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    reference: Reference
    expected: list[np.ndarray]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("models") / request.param
    write_checkpoint(["--out", str(path), "--family", request.param, "--size", "tiny"])
    reference = reference_of(path)
    givens = [Given(parts=parts, role=Role.PASSAGE) for parts in INPUTS]
    return Checkpoint(path, reference, [np.atleast_2d(reference.answer(given)) for given in givens])


def sent(parts: Parts) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{base64.b64encode(part).decode()}"},
        }
        for part in parts
    ]


def post(service: Service, inputs: Sequence[Parts], **more: Any) -> httpx.Response:
    body = {"model": MODEL, "input": [sent(parts) for parts in inputs], "input_type": "passage", **more}
    return httpx.post(f"{service.url}/v1/embeddings", json=body, timeout=120)


def same(answer: httpx.Response, expected: Sequence[np.ndarray]) -> None:
    assert answer.status_code == 200, answer.text
    for row, wanted in zip(answer.json()["data"], expected, strict=True):
        found = np.atleast_2d(np.array(row["embedding"]))
        assert found.shape == wanted.shape
        assert cosines(found, wanted).min() >= 0.99999


@pytest.fixture(scope="module", params=WAYS)
def served(
    request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Service]]:
    folder, environment = tmp_path_factory.mktemp("service"), {}
    script, workers = ("agg.sh", 1) if request.param == "agg" else ("e_p.sh", 2)
    for role in ("encode", "embed") if workers == 2 else ():
        config = folder / f"{role}.yaml"
        config.write_text(f"transport: {{kind: {request.param}}}\n")
        environment[f"{role.upper()}_ENGINE_ARGS"] = str(config)
    with launch(script, checkpoint.path, folder / "log", workers=workers, environment=environment) as running:
        yield request.param, running


def test_vectors_are_those_of_transformers(served: tuple[str, Service], checkpoint: Checkpoint) -> None:
    """Never seen and cached, in company and alone; each image is encoded and handed over once."""
    way, service = served
    same(post(service, INPUTS), checkpoint.expected)
    again = post(service, INPUTS[::-1])
    same(again, checkpoint.expected[::-1])
    details = again.json()["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == details["image_tokens"] > 100
    for parts, wanted in zip(INPUTS, checkpoint.expected, strict=True):
        same(post(service, [parts]), [wanted])
    assert service.worker_metric(0, "tessera_batch_entries_sum", stage="vision") == len(IMAGES)
    if way != "agg":
        assert service.worker_metric(1, "tessera_transfers_total", route=way, outcome="ok") == len(IMAGES)


def test_a_broken_image_fails_alone(served: tuple[str, Service], checkpoint: Checkpoint) -> None:
    _, service = served
    first, broken, last = post(service, [INPUTS[1], (WIDE[:400], "x"), INPUTS[0]], partial=True).json()[
        "data"
    ]
    assert broken["error"]["param"].startswith("input[1]")
    for row, wanted in ((first, checkpoint.expected[1]), (last, checkpoint.expected[0])):
        assert cosines(np.atleast_2d(np.array(row["embedding"])), wanted).min() >= 0.99999


def test_what_is_too_long_is_refused_by_name(served: tuple[str, Service]) -> None:
    _, service = served
    answer = post(service, [INPUTS[0], (WIDE, "river " * 40_000)])
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith("input[1]")


def test_a_worker_that_dies_is_replaced(served: tuple[str, Service], checkpoint: Checkpoint) -> None:
    way, service = served
    if way not in ("agg", "shm"):
        pytest.skip("workers die in two of the ways")
    workers = 1 if way == "agg" else 2
    for worker in range(workers):
        os.kill(service.pids_in_order(1 + workers)[1 + worker], signal.SIGKILL)
        fresh: Parts = (TALL + b"\0" * (1 + worker), "again")
        wanted = np.atleast_2d(checkpoint.reference.answer(Given(parts=fresh, role=Role.PASSAGE)))
        deadline = time.monotonic() + 90
        while (answer := post(service, [fresh, *INPUTS])).status_code != 200:
            assert answer.status_code in (502, 503, 504), answer.text
            assert time.monotonic() < deadline
            time.sleep(0.2)
        same(answer, [wanted, *checkpoint.expected])
