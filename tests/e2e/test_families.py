"""One table of families behind the launch scripts: aggregated, split by every hand-off, and when workers die.

An input of a reranker is a document, which is scored with one query that has an image, too. Of two towers
nothing is handed over, and no worker but one reads text alone: both are split in one way.
"""

from __future__ import annotations

import base64
import functools
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
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

Parts = tuple[str | bytes, ...]
LOGITS_SAME = 2e-4
QUERY: Parts = (WIDE, "Which page shows the river?")


@dataclass(frozen=True, slots=True)
class Kind:
    """What families of one kind read, a text first and then an image; and the ways that they are split.

    ``mixes`` says that an input may have both.
    """

    inputs: tuple[Parts, ...]
    ways: tuple[str, ...]
    mixes: bool = False

    @property
    def images(self) -> set[bytes]:
        return {part for parts in self.inputs for part in parts if isinstance(part, bytes)}

    def beside_text(self, image: bytes, text: str) -> Parts:
        """The image with the text, or alone."""
        return (image, text) if self.mixes else (image,)


MIXED = Kind(
    (
        ("a yellow heart",),
        (WIDE,),
        (SMALL, "a market in the light of morning"),
        (TALL, WIDE, TALL),
        (SMALL, "one ", WIDE, "two", STRIP, TALL, LARGE),
    ),
    ("agg", "shm", "inline", "nixl"),
    mixes=True,
)
TOWERS = Kind(
    (("a photo of a temple",), (WIDE,), ("RIVER!",), (TALL,), ("the red flower in the light",), (STRIP,)),
    ("agg", "shm"),
)
TEXTS = Kind((("a yellow heart",), ("the river under the bridge " * 60,), ("x",)), ("agg", "shm"))

FAMILIES: Mapping[str, Kind] = {
    "nemotron_3_5_embed": MIXED,
    "nemotron_colembed_vl": MIXED,
    "qwen3_vl_rerank": MIXED,
    "clip": TOWERS,
    "siglip": TOWERS,
    "siglip2": TOWERS,
    "nemotron_3_embed": TEXTS,
}
_NO_NIXL = pytest.mark.skipif(nixl_missing() is not None, reason="needs nixl")
SERVED = [
    pytest.param((family, way), marks=[_NO_NIXL] if way == "nixl" else [], id=f"{family}-{way}")
    for family, kind in FAMILIES.items()
    for way in kind.ways
]


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


@dataclass(frozen=True, slots=True)
class Served:
    """A family behind one of the scripts; worker 0 has images, the last has texts."""

    kind: Kind
    checkpoint: Checkpoint
    way: str
    service: Service

    @property
    def scores(self) -> bool:
        return self.checkpoint.scores

    @property
    def split(self) -> bool:
        return self.way != "agg"

    def post(self, inputs: Sequence[Parts], route: str = "/v1/rerank", **more: Any) -> httpx.Response:
        """Ask for the vectors of inputs; for scores by ``route``."""
        body: dict[str, Any] = {"model": MODEL, **more}
        if self.scores:
            documents = [{"content": sent(parts)} for parts in inputs]
            body |= {"query": {"content": sent(QUERY)}, "documents": documents, "use_activation": False}
            return httpx.post(f"{self.service.url}{route}", json=body, timeout=120)
        body |= {"input": [sent(parts) for parts in inputs], "input_type": "passage"}
        return httpx.post(f"{self.service.url}/v1/embeddings", json=body, timeout=120)

    def name(self, index: int) -> str:
        """What errors call an input."""
        return f"documents[{index}]" if self.scores else f"input[{index}]"

    def same(self, answer: httpx.Response, inputs: Sequence[Parts]) -> None:
        assert answer.status_code == 200, answer.text
        expected = [self.checkpoint.expected(parts) for parts in inputs]
        if self.scores:
            logits = {row["index"]: row["relevance_score"] for row in answer.json()["results"]}
            found = [logits.pop(index) for index in range(len(inputs))]
            assert not logits
            np.testing.assert_allclose(found, np.concatenate(expected)[:, 0], atol=LOGITS_SAME)
            return
        for row, wanted in zip(answer.json()["data"], expected, strict=True):
            self.same_rows(row, wanted)

    def same_rows(self, row: dict[str, Any], wanted: np.ndarray) -> None:
        found = np.atleast_2d(np.array(row["embedding"]))
        assert found.shape == wanted.shape
        assert cosines(found, wanted).min() >= 0.99999

    def until_answered(self, inputs: Sequence[Parts]) -> None:
        """Ask until workers are there again, and check the answer."""

        def answered() -> httpx.Response | None:
            answer = self.post(inputs)
            assert answer.status_code in (200, 502, 503, 504), answer.text
            return answer if answer.status_code == 200 else None

        answer = wait_until(answered)
        assert answer is not None
        self.same(answer, inputs)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """A checkpoint of a family, and with it what the reference gives, made once for all ways."""

    @functools.cache
    def made(family: str) -> Checkpoint:
        path = tmp_path_factory.mktemp("models") / family
        write_checkpoint(["--out", str(path), "--family", family, "--size", "tiny"])
        return Checkpoint(path, reference_of(path))

    return made


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


@pytest.fixture(scope="module", params=SERVED)
def served(
    request: pytest.FixtureRequest,
    checkpoints: Callable[[str], Checkpoint],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    family, way = request.param
    folder, environment = tmp_path_factory.mktemp("service"), {}
    script, workers = ("agg.sh", 1) if way == "agg" else ("e_p.sh", 2)
    for role in ("encode", "embed") if workers == 2 else ():
        config = folder / f"{role}.yaml"
        config.write_text(f"transport: {{kind: {way}}}\n")
        environment[f"TESSERA_{role.upper()}_ENGINE_ARGS"] = str(config)
    checkpoint = checkpoints(family)
    with launch(script, checkpoint.path, folder / "log", workers=workers, environment=environment) as running:
        yield Served(FAMILIES[family], checkpoint, way, running)


def only(served: Served, *kinds: Kind, because: str) -> None:
    if served.kind not in kinds:
        pytest.skip(because)


def test_answers_are_those_of_transformers(served: Served) -> None:
    """Never seen and cached, in company and alone; each image is encoded and handed over once."""
    kind, inputs, metric = served.kind, served.kind.inputs, served.service.worker_metric
    served.same(served.post(inputs), inputs)
    again = served.post(inputs[::-1])
    served.same(again, inputs[::-1])
    for parts in inputs:
        served.same(served.post([parts]), [parts])
    if not kind.images:
        return
    details = again.json()["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == details["image_tokens"] >= len(kind.images)
    assert metric(0, "tessera_batch_entries_sum", stage="vision") == len(kind.images)
    if served.split and kind.mixes:
        handed = metric(1, "tessera_transfers_total", route=served.way, outcome="ok")
        assert handed == len(kind.images)
    if not kind.mixes:
        # Each worker answers alone: what a text engine sees are texts, and an image asks for no other worker.
        texts = metric(len(served.service.worker_ports) - 1, "tessera_batch_entries_sum", stage="text")
        assert texts == 3 * (len(inputs) - len(kind.images))
        assert metric(0, "tessera_embedding_cache_hits_total") == 2 * len(kind.images)
    if served.split and not kind.mixes:
        assert metric(1, "tessera_transfers_total") == 0
        assert metric(0, "tessera_batch_entries_sum", stage="text") == 0


def test_every_route_gives_the_same_scores(served: Served) -> None:
    if not served.scores:
        pytest.skip("it makes vectors")
    inputs, expected = served.kind.inputs, served.checkpoint.expected
    for route in ("/rerank", "/v1/rerank", "/v2/rerank"):
        served.same(served.post(inputs, route), inputs)
    wanted = np.concatenate([expected(parts) for parts in inputs])[:, 0]
    body = {"model": MODEL, "use_activation": False, "queries": {"content": sent(QUERY)}}
    body["documents"] = [{"content": sent(parts)} for parts in inputs]
    for route in ("/score", "/v1/score"):
        answer = httpx.post(f"{served.service.url}{route}", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        found = [row["score"] for row in answer.json()["data"]]
        np.testing.assert_allclose(found, wanted, atol=LOGITS_SAME, err_msg=route)
    # NVIDIA's queries are texts, and its passages have one image at most.
    question, passages = "Which page shows the river?", inputs[:3]
    given = [
        {
            "text" if part["type"] == "text" else "image": part.get("text") or part["image_url"]["url"]
            for part in sent(parts)
        }
        for parts in passages
    ]
    body = {"model": MODEL, "query": {"text": question}, "passages": given}
    for route in ("/v1/ranking", f"/v1/retrieval/{MODEL}/reranking"):
        answer = httpx.post(f"{served.service.url}{route}", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        logits = {row["index"]: row["logit"] for row in answer.json()["rankings"]}
        asked = [expected(parts, (question,))[0, 0] for parts in passages]
        found = [logits[index] for index in range(len(passages))]
        np.testing.assert_allclose(found, asked, atol=LOGITS_SAME, err_msg=route)


def test_a_broken_image_fails_alone(served: Served) -> None:
    only(served, MIXED, TOWERS, because="it reads no images")
    text, image, *_ = served.kind.inputs
    inputs = [image, served.kind.beside_text(WIDE[:400], "x"), text]
    if served.scores:
        # The answer to a rerank is an order, and has no place for an error.
        refused = served.post(inputs)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"].startswith(served.name(1))
        served.same(served.post([image, text]), [image, text])
        return
    first, broken, last = served.post(inputs, partial=True).json()["data"]
    assert broken["error"]["param"].startswith(served.name(1))
    served.same_rows(first, served.checkpoint.expected(image))
    served.same_rows(last, served.checkpoint.expected(text))


def test_what_is_too_long_is_refused_by_name(served: Served) -> None:
    # What a reranker is asked about is cut where nothing else is said.
    unlike = {"truncate": "NONE"} if served.scores else {}
    long = "river " * 40_000
    answer = served.post([served.kind.inputs[0], (WIDE, long) if served.kind.mixes else (long,)], **unlike)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(served.name(1))


def test_what_is_not_read_is_refused_by_name(served: Served) -> None:
    """An image beside anything where each is an input of its own, and any image where none is read."""
    only(served, TOWERS, TEXTS, because="it reads all of that")
    text = served.kind.inputs[0]
    for parts in ((WIDE, "a flower"), ("a flower", WIDE), (WIDE, TALL)):
        answer = served.post([text, parts])
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].startswith("input[1]")
        first, refused, last = served.post([text, parts, text], partial=True).json()["data"]
        assert refused["error"]["param"].startswith("input[1]")
        for row in (first, last):
            served.same_rows(row, served.checkpoint.expected(text))


def test_vectors_of_towers_are_as_long_as_they_gave_them(served: Served) -> None:
    only(served, TOWERS, because="it has no towers")
    answer = served.post(served.kind.inputs, normalize=False).json()
    for row, parts in zip(answer["data"], served.kind.inputs, strict=True):
        assert abs(np.linalg.norm(row["embedding"]) - 1) > 1e-3
        served.same_rows(row, served.checkpoint.expected(parts))
    usage = served.post([(WIDE,)]).json()["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["image_tokens"]) == (1, 1)


def test_a_worker_that_dies_is_replaced(served: Served) -> None:
    if served.way not in ("agg", "shm"):
        pytest.skip("workers die in two of the ways")
    kind, workers = served.kind, len(served.service.worker_ports)
    for worker, pid in enumerate(served.service.pids_in_order(1 + workers)[1:]):
        if pid < 0:
            # An encode worker that is not there: no image is read.
            assert kind is TEXTS
            continue
        os.kill(pid, signal.SIGKILL)
        fresh = kind.beside_text(TALL + b"\0" * (1 + worker), "again") if kind.images else ("again",)
        if kind is TOWERS and worker == 1:
            # Of texts nobody answers now; images need nobody but their own worker.
            served.same(served.post([fresh]), [fresh])
        served.until_answered([fresh, *kind.inputs])
