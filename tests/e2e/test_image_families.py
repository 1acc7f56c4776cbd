"""Families whose images keep their shape: aggregated, split by every hand-off, and when workers die.

An input of a reranker is a document, which is scored with one query that has an image, too.
"""

from __future__ import annotations

import base64
import functools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
from tests.models.running import Given, Pair, cosines
from tests.references.families import Reference, reference_of
from tests.references.qwen3 import Qwen3VLRerankReference
from tests.waiting import wait_until

pytestmark = pytest.mark.service

FAMILIES = ("nemotron_3_5_embed", "nemotron_colembed_vl", "qwen3_vl_rerank")
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
QUERY: Parts = (WIDE, "Which page shows the river?")
IMAGES = {part for parts in INPUTS for part in parts if isinstance(part, bytes)}
LOGITS_SAME = 2e-4


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    reference: Reference
    known: dict[tuple[Parts, Parts], np.ndarray] = field(default_factory=dict)

    @property
    def scores(self) -> bool:
        return isinstance(self.reference, Qwen3VLRerankReference)

    def expected(self, parts: Parts, query: Parts = QUERY) -> np.ndarray:
        """The rows of an input, or its logit."""
        if (query, parts) not in self.known:
            given: Given | Pair = Given(parts=parts, role=Role.PASSAGE)
            if self.scores:
                given = Pair(query=Given(parts=query), document=Given(parts=parts))
            self.known[query, parts] = np.atleast_2d(self.reference.answer(given))
        return self.known[query, parts]

    def post(
        self, service: Service, inputs: Sequence[Parts], route: str = "/v1/rerank", **more: Any
    ) -> httpx.Response:
        """Ask for the vectors of inputs; for scores by ``route``."""
        body: dict[str, Any] = {"model": MODEL, **more}
        if self.scores:
            documents = [{"content": sent(parts)} for parts in inputs]
            body |= {"query": {"content": sent(QUERY)}, "documents": documents, "use_activation": False}
            return httpx.post(f"{service.url}{route}", json=body, timeout=120)
        body |= {"input": [sent(parts) for parts in inputs], "input_type": "passage"}
        return httpx.post(f"{service.url}/v1/embeddings", json=body, timeout=120)

    def name(self, index: int) -> str:
        """What errors call an input."""
        return f"documents[{index}]" if self.scores else f"input[{index}]"

    def same(self, answer: httpx.Response, inputs: Sequence[Parts]) -> None:
        assert answer.status_code == 200, answer.text
        expected = [self.expected(parts) for parts in inputs]
        if self.scores:
            logits = {row["index"]: row["relevance_score"] for row in answer.json()["results"]}
            found = [logits.pop(index) for index in range(len(inputs))]
            assert not logits
            np.testing.assert_allclose(found, np.concatenate(expected)[:, 0], atol=LOGITS_SAME)
            return
        for row, wanted in zip(answer.json()["data"], expected, strict=True):
            found_rows = np.atleast_2d(np.array(row["embedding"]))
            assert found_rows.shape == wanted.shape
            assert cosines(found_rows, wanted).min() >= 0.99999


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """A checkpoint of a family, and with it what the reference gives, made once for all ways."""

    @functools.cache
    def made(family: str) -> Checkpoint:
        path = tmp_path_factory.mktemp("models") / family
        write_checkpoint(["--out", str(path), "--family", family, "--size", "tiny"])
        return Checkpoint(path, reference_of(path))

    return made


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, checkpoints: Callable[[str], Checkpoint]) -> Checkpoint:
    return checkpoints(request.param)


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


@pytest.fixture(scope="module", params=WAYS)
def served(
    request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Service]]:
    folder, environment = tmp_path_factory.mktemp("service"), {}
    script, workers = ("agg.sh", 1) if request.param == "agg" else ("e_p.sh", 2)
    for role in ("encode", "embed") if workers == 2 else ():
        config = folder / f"{role}.yaml"
        config.write_text(f"transport: {{kind: {request.param}}}\n")
        environment[f"TESSERA_{role.upper()}_ENGINE_ARGS"] = str(config)
    with launch(script, checkpoint.path, folder / "log", workers=workers, environment=environment) as running:
        yield request.param, running


def test_answers_are_those_of_transformers(served: tuple[str, Service], checkpoint: Checkpoint) -> None:
    """Never seen and cached, in company and alone; each image is encoded and handed over once."""
    way, service = served
    checkpoint.same(checkpoint.post(service, INPUTS), INPUTS)
    again = checkpoint.post(service, INPUTS[::-1])
    checkpoint.same(again, INPUTS[::-1])
    details = again.json()["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == details["image_tokens"] > 100
    for parts in INPUTS:
        checkpoint.same(checkpoint.post(service, [parts]), [parts])
    assert service.worker_metric(0, "tessera_batch_entries_sum", stage="vision") == len(IMAGES)
    if way != "agg":
        assert service.worker_metric(1, "tessera_transfers_total", route=way, outcome="ok") == len(IMAGES)


def test_every_route_gives_the_same_scores(served: tuple[str, Service], checkpoint: Checkpoint) -> None:
    if not checkpoint.scores:
        pytest.skip("it makes vectors")
    _, service = served
    for route in ("/rerank", "/v1/rerank", "/v2/rerank"):
        checkpoint.same(checkpoint.post(service, INPUTS, route), INPUTS)
    wanted = np.concatenate([checkpoint.expected(parts) for parts in INPUTS])[:, 0]
    body = {"model": MODEL, "use_activation": False, "queries": {"content": sent(QUERY)}}
    body["documents"] = [{"content": sent(parts)} for parts in INPUTS]
    for route in ("/score", "/v1/score"):
        answer = httpx.post(f"{service.url}{route}", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        found = [row["score"] for row in answer.json()["data"]]
        np.testing.assert_allclose(found, wanted, atol=LOGITS_SAME, err_msg=route)
    # NVIDIA's queries are texts, and its passages have one image at most.
    question, passages = "Which page shows the river?", INPUTS[:3]
    given = [
        {
            "text" if part["type"] == "text" else "image": part.get("text") or part["image_url"]["url"]
            for part in sent(parts)
        }
        for parts in passages
    ]
    body = {"model": MODEL, "query": {"text": question}, "passages": given}
    for route in ("/v1/ranking", f"/v1/retrieval/{MODEL}/reranking"):
        answer = httpx.post(f"{service.url}{route}", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        logits = {row["index"]: row["logit"] for row in answer.json()["rankings"]}
        asked = [checkpoint.expected(parts, (question,))[0, 0] for parts in passages]
        found = [logits[index] for index in range(len(passages))]
        np.testing.assert_allclose(found, asked, atol=LOGITS_SAME, err_msg=route)


def test_a_broken_image_fails_alone(served: tuple[str, Service], checkpoint: Checkpoint) -> None:
    _, service = served
    inputs = [INPUTS[1], (WIDE[:400], "x"), INPUTS[0]]
    if checkpoint.scores:
        # The answer to a rerank is an order, and has no place for an error.
        refused = checkpoint.post(service, inputs)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"].startswith(checkpoint.name(1))
        sound = [inputs[0], inputs[2]]
        checkpoint.same(checkpoint.post(service, sound), sound)
        return
    first, broken, last = checkpoint.post(service, inputs, partial=True).json()["data"]
    assert broken["error"]["param"].startswith(checkpoint.name(1))
    for row, parts in ((first, inputs[0]), (last, inputs[2])):
        found = np.atleast_2d(np.array(row["embedding"]))
        assert cosines(found, checkpoint.expected(parts)).min() >= 0.99999


def test_what_is_too_long_is_refused_by_name(served: tuple[str, Service], checkpoint: Checkpoint) -> None:
    _, service = served
    # What a reranker is asked about is cut where nothing else is said.
    unlike = {"truncate": "NONE"} if checkpoint.scores else {}
    answer = checkpoint.post(service, [INPUTS[0], (WIDE, "river " * 40_000)], **unlike)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(checkpoint.name(1))


def test_a_worker_that_dies_is_replaced(served: tuple[str, Service], checkpoint: Checkpoint) -> None:
    way, service = served
    if way not in ("agg", "shm"):
        pytest.skip("workers die in two of the ways")
    workers = 1 if way == "agg" else 2
    for worker in range(workers):
        os.kill(service.pids_in_order(1 + workers)[1 + worker], signal.SIGKILL)
        fresh: Parts = (TALL + b"\0" * (1 + worker), "again")

        def answered() -> httpx.Response | None:
            answer = checkpoint.post(service, [fresh, *INPUTS])  # noqa: B023
            assert answer.status_code in (200, 502, 503, 504), answer.text
            return answer if answer.status_code == 200 else None

        answer = wait_until(answered, 120)
        assert answer is not None
        checkpoint.same(answer, [fresh, *INPUTS])
