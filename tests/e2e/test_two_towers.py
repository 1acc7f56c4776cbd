"""Families in which an image's row is its vector: aggregated, split, and when workers die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tessera_tools.random_checkpoint.checkpoint import main as write_checkpoint
from tests.e2e.inputs import parts
from tests.e2e.service import MODEL, Service, launch
from tests.models.running import Given
from tests.references.families import reference_of
from tests.waiting import wait_until

pytestmark = pytest.mark.service

TEXTS = ["a photo of a temple", "RIVER!", "the red flower in the light of morning"]
WAYS = {"agg": ("agg.sh", 1), "split": ("e_p.sh", 2)}
SERVED = [(family, way) for family in ("clip", "siglip", "siglip2") for way in WAYS]


@dataclass(frozen=True, slots=True)
class Served:
    running: Service
    way: str
    inputs: list[Any]
    expected: np.ndarray

    @property
    def vision(self) -> int:
        """The worker that has images, and their cache."""
        return 0

    @property
    def text(self) -> int:
        """The worker that has texts."""
        return 0 if self.way == "agg" else 1

    def post(self, **body: object) -> httpx.Response:
        asked = {"model": MODEL, **body}
        return httpx.post(f"{self.running.url}/v1/embeddings", json=asked, timeout=60)

    def embed(self, inputs: list[Any]) -> np.ndarray:
        answer = self.post(input=inputs)
        assert answer.status_code == 200, answer.text
        return np.array([row["embedding"] for row in answer.json()["data"]])


@pytest.fixture(scope="module", params=SERVED, ids="-".join)
def served(
    request: pytest.FixtureRequest, photos: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    family, way = request.param
    folder = tmp_path_factory.mktemp(family)
    path: Path = folder / "model"
    write_checkpoint(["--out", str(path), "--family", family, "--size", "tiny"])
    reference = reference_of(path)
    givens = [*TEXTS, *photos.values()]
    expected = np.stack([reference.answer(Given(parts=(given,))) for given in givens])
    script, workers = WAYS[way]
    inputs = [*TEXTS, *(parts(None, photo) for photo in photos.values())]
    with launch(script, path, folder / "log", workers=workers) as running:
        yield Served(running, way, inputs, expected)


def test_vectors_are_those_of_transformers(served: Served) -> None:
    """Never seen and cached, alone and in company; what the text engine sees are texts."""
    images = len(served.inputs) - len(TEXTS)
    for turn in range(2):
        for given, wanted in zip(served.inputs, served.expected, strict=True):
            assert served.embed([given])[0] @ wanted >= 0.99999, turn
    found = served.embed(served.inputs[::-1])[::-1]
    assert np.einsum("ij,ij->i", found, served.expected).min() >= 0.99999
    metric = served.running.worker_metric
    assert metric(served.vision, "tessera_batch_entries_sum", stage="vision") == images
    assert metric(served.text, "tessera_batch_entries_sum", stage="text") == 3 * len(TEXTS)
    assert metric(served.vision, "tessera_embedding_cache_hits_total") == 2 * images
    if served.way == "split":
        # Each worker answers alone: nothing is handed from one to the other.
        assert metric(served.text, "tessera_transfers_total") == 0
        assert metric(served.vision, "tessera_batch_entries_sum", stage="text") == 0


def test_an_image_counts_as_one_token(served: Served) -> None:
    usage = served.post(input=[served.inputs[-1]]).json()["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["image_tokens"]) == (1, 1)


def test_an_image_beside_anything_is_refused_by_name(served: Served, photos: dict[str, bytes]) -> None:
    china, flower = photos["china"], photos["flower"]
    for mixed in (parts("a flower", flower), parts(None, china, flower)):
        answer = served.post(input=["good", mixed])
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].startswith("input[1]")
    partial = served.post(input=["good", parts("a flower", flower), parts(None, flower)], partial=True).json()
    assert [entry.get("error") is None for entry in partial["data"]] == [True, False, True]


def test_a_broken_image_fails_alone(served: Served, photos: dict[str, bytes]) -> None:
    inputs = [served.inputs[-1], parts(None, photos["china"][:5000]), TEXTS[0]]
    first, broken, last = served.post(input=inputs, partial=True).json()["data"]
    assert broken["error"]["param"].startswith("input[1]")
    assert np.array(first["embedding"]) @ served.expected[-1] >= 0.99999
    assert np.array(last["embedding"]) @ served.expected[0] >= 0.99999


def test_lengths_are_those_of_the_towers(served: Served) -> None:
    """Without normalising a vector has the length that its tower gave it."""
    answer = served.post(input=served.inputs, normalize=False)
    found = np.array([row["embedding"] for row in answer.json()["data"]])
    lengths = np.linalg.norm(found, axis=1)
    assert (np.abs(lengths - 1) > 1e-3).all()
    assert (np.einsum("ij,ij->i", found, served.expected) / lengths).min() >= 0.99999


def test_a_worker_that_dies_is_replaced(served: Served, photos: dict[str, bytes]) -> None:
    workers = dict.fromkeys((served.vision, served.text))
    for worker in workers:
        os.kill(served.running.pids_in_order(1 + len(workers))[1 + worker], signal.SIGKILL)
        fresh = parts(None, photos["china"] + b"\0" + str((worker, time.time())).encode())
        alone = [fresh] if worker == served.text and served.way == "split" else None
        if alone is not None:
            # Of texts nobody answers now; images need nobody but their own worker.
            assert served.embed(alone)[0] @ served.expected[len(TEXTS)] >= 0.99999

        def answered() -> httpx.Response | None:
            answer = served.post(input=[fresh, *TEXTS])  # noqa: B023
            assert answer.status_code in (200, 502, 503, 504), answer.text
            return answer if answer.status_code == 200 else None

        answer = wait_until(answered, 120)
        assert answer is not None
        row = np.array(answer.json()["data"][0]["embedding"])
        assert row @ served.expected[len(TEXTS)] >= 0.99999
