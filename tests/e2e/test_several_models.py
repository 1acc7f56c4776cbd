"""Two embedders and a reranker behind one frontend, each with a worker of its own."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.http

from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.llama_nemotron_vl import RERANK_TINY
from tessera_tools.random_checkpoint.qwen3 import TINY
from tests.e2e.several import Several, listing, several
from tests.signals import freeze, signal_process
from tests.waiting import wait_for_line, wait_until

pytestmark = [pytest.mark.service, pytest.mark.several, pytest.mark.xdist_group("several")]

PICTURES, TEXTS, RERANKER = "org/Pictures.v1", "texts", "org/reranker"


@pytest.fixture(scope="module")
def checkpoints(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    write_checkpoint(folder / "texts", TINY, seed=1)
    write_checkpoint(folder / "reranker", RERANK_TINY, seed=2)
    return {PICTURES: checkpoint, TEXTS: folder / "texts", RERANKER: folder / "reranker"}


@pytest.fixture(scope="module")
def models(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    folder = tmp_path_factory.mktemp("several")
    flags = ("--result-cache-mb", "4", "--worker-wait-seconds", "0", "--log-format", "json")
    with several(folder, checkpoints, *flags) as running:
        yield running


def width(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return len(answer.json()["data"][0]["embedding"])


def error(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


def test_a_request_chooses_its_model_by_name(models: Several) -> None:
    for asked, name in (
        (PICTURES, PICTURES),
        ("ORG/pictures_V1", PICTURES),
        ("org/Pictures.v1-query", PICTURES),
        (TEXTS, TEXTS),
    ):
        answer = models.post("/v1/embeddings", model=asked, input="a text")
        assert (answer.status_code, answer.json()["model"]) == (200, name), answer.text
    # Each from its own model, and from its own results the second time.
    vectors = {
        name: [models.post("/v1/embeddings", model=name, input="the same").json()["data"] for _ in range(2)]
        for name in (PICTURES, TEXTS)
    }
    assert vectors[PICTURES][0] != vectors[TEXTS][0]
    assert all(first == second for first, second in vectors.values())


def test_each_model_has_its_own_names_in_kserve(models: Several) -> None:
    client = tritonclient.http.InferenceServerClient(models.url.removeprefix("http://"))
    names = {one["name"] for one in client.get_model_repository_index()}
    # A reranker has no vectors.
    pictures = {f"org_pictures_v1{suffix}" for suffix in ("", "_router", "_hidden", "_vit")}
    assert names == pictures | {"texts", "texts_router", "texts_hidden"}
    text = tritonclient.http.InferInput("text", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([["a text"]], object))
    for name, own in (("ORG_Pictures_v1", PICTURES), ("texts", TEXTS)):
        found = client.infer(name, [text], parameters={"input_type": "passage"}).as_numpy("embeddings")
        answer = models.post("/v1/embeddings", model=own, input="a text", input_type="passage")
        assert np.allclose(found[0], answer.json()["data"][0]["embedding"], atol=1e-6)
    # Which of them it would be nobody says.
    assert not client.is_model_ready("router")
    client.close()


def test_an_unknown_name_is_answered_with_those_that_are_known(models: Several) -> None:
    status, said = error(models.post("/v1/embeddings", model="other", input="a"))
    assert status == 404 and all(repr(name) in said for name in (PICTURES, TEXTS, RERANKER))


def test_without_a_name_the_only_model_for_the_route_answers(models: Several) -> None:
    status, said = error(models.post("/v1/embeddings", input="a"))
    assert status == 400 and repr(PICTURES) in said and repr(TEXTS) in said and RERANKER not in said
    asked = {"query": "a", "documents": ["a", "b"]}
    ranked = models.post("/v1/rerank", **asked)
    assert ranked.status_code == 200
    assert ranked.json()["results"] == models.post("/v1/rerank", model=RERANKER, **asked).json()["results"]
    # Cosines, where an embedder is asked for them.
    compared = models.post("/v1/rerank", model=TEXTS, **asked)
    assert compared.status_code == 200 and compared.json()["results"] != ranked.json()["results"]
    ranking = {"query": {"text": "a"}, "passages": [{"text": "b"}]}
    assert models.post("/v1/ranking", **ranking).status_code == 200
    assert models.post("/v1/ranking", model=TEXTS, **ranking).status_code == 404
    assert models.post("/", query="a", texts=["b"]).status_code == 200
    assert models.post("/embed", inputs="a", model=TEXTS).status_code == 200
    # As Text-Embeddings-Inference says that something is wrong with a request.
    assert models.post("/embed", inputs="a").status_code == 422
    assert models.post("/tokenize", model=TEXTS, prompt="a").status_code == 200
    assert models.post("/tokenize", prompt="a").status_code == 400


def test_nim_paths_name_their_model(models: Several) -> None:
    ranking = {"query": {"text": "a"}, "passages": [{"text": "b"}]}
    assert models.post("/v1/retrieval/ORG/Reranker/reranking", **ranking).status_code == 200
    assert models.post("/v1/retrieval/texts/reranking", **ranking).status_code == 404


def test_everything_that_is_said_names_the_models(models: Several) -> None:
    cards = httpx.get(f"{models.url}/v1/models").json()["data"]
    assert [card["id"] for card in cards] == [PICTURES, TEXTS, RERANKER]
    assert [card["task"] for card in cards] == ["embed", "embed", "classify"]
    assert [card["pooling"] for card in cards] == [["mean"], ["lasttoken"], None]
    assert sorted(cards[1]["prompts"]) == ["document", "query"] and not cards[0]["prompts"]
    assert "/v1/ranking" in cards[2]["routes"] and "/v1/ranking" not in cards[0]["routes"]
    assert httpx.get(f"{models.url}/v1/models/ORG/pictures_v1").json()["id"] == PICTURES
    health = httpx.get(f"{models.url}/health").json()
    assert health["workers"] == {"embed": 3, "encode": 0}
    assert list(health["models"]) == [PICTURES, TEXTS, RERANKER]
    assert health["models"][PICTURES]["images"] and not health["models"][TEXTS]["images"]
    status = httpx.get(f"{models.url}/status").json()
    assert [model["model"] for model in status["models"]] == [PICTURES, TEXTS, RERANKER]
    assert all(len(model["workers"]) == 1 for model in status["models"])
    info = httpx.get(f"{models.url}/v1/metadata").json()["modelInfo"]
    assert [model["shortName"].rpartition(":")[0] for model in info] == [PICTURES, TEXTS, RERANKER]
    width(models.post("/v1/embeddings", model=TEXTS, input="counted"))
    metrics = httpx.get(f"{models.url}/metrics").text
    for name in ("tessera_workers", "tessera_inputs_total", "tessera_info", "tessera_admitted_tokens"):
        assert any(line.startswith(name) and f'model="{TEXTS}"' in line for line in metrics.splitlines()), (
            name
        )
    lines = [json.loads(line) for line in models.log.read_text().splitlines() if line.startswith("{")]
    assert any(line.get("model") == TEXTS for line in lines)


def test_a_model_without_workers_refuses_its_own_requests_alone(
    models: Several, checkpoints: dict[str, Path]
) -> None:
    # One that is ready with all models alone.
    all_of_them = models.start_frontend("--health-needs", "all")
    until_health(all_of_them, 200, "ready")
    models.workers[TEXTS].kill()
    models.wait(TEXTS, status="not ready")
    until_health(all_of_them, 503, f"not ready: {TEXTS}")
    assert httpx.get(f"{all_of_them}/v1/health/ready").status_code == 503
    answer = models.post("/v1/embeddings", model=TEXTS, input="not kept yet")
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
    assert models.post("/v1/embeddings", model=PICTURES, input="a").status_code == 200
    health = httpx.get(f"{models.url}/health")
    assert (health.status_code, health.json()["missing"]) == (200, {"embed": 1, "encode": 0})
    assert health.json()["ready"] == [PICTURES, RERANKER]
    models.start_worker(TEXTS, checkpoints[TEXTS])
    models.wait(TEXTS)
    assert models.post("/v1/embeddings", model=TEXTS, input="not kept yet").status_code == 200
    until_health(all_of_them, 200, "ready")


def until_health(url: str, status: int, said: str) -> None:
    """Wait until a frontend answers so."""

    def found() -> tuple[int, str]:
        answer = httpx.get(f"{url}/health")
        return answer.status_code, answer.json()["status"]

    wait_until(lambda: found() == (status, said), despite=httpx.TransportError)


def test_models_come_and_go_while_the_others_answer(models: Several, checkpoints: dict[str, Path]) -> None:
    """The one that stays is asked all the time; the list is changed, broken and changed back."""
    pictures, texts, reranker = (
        listing(name, path, slot) for slot, (name, path) in enumerate(checkpoints.items())
    )
    statuses: set[int] = set()
    done = threading.Event()

    def ask(number: int) -> None:
        with httpx.Client(base_url=models.url, timeout=60) as client:
            while not done.is_set():
                body = {"model": PICTURES, "input": f"{number} {len(statuses)}"}
                statuses.add(client.post("/v1/embeddings", json=body).status_code)

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask, number) for number in range(2)]
        try:
            models.serve(
                pictures, texts, listing("later", checkpoints[RERANKER], 2, loading="is being downloaded")
            )
            models.wait(RERANKER, status=None)
            models.wait("later", status="is being downloaded")
            status, said = error(models.post("/v1/rerank", model="later", query="a", documents=["b"]))
            assert status == 503 and said == "the model 'later' is being downloaded"
            assert error(models.post("/v1/rerank", model=RERANKER, query="a", documents=["b"]))[0] == 404
            # Nobody can be asked who scores pairs, and an embedder was not asked for cosines.
            assert (
                models.post("/v1/ranking", query={"text": "a"}, passages=[{"text": "b"}]).status_code == 503
            )
            models.serve(pictures)
            models.wait(TEXTS, status=None)
            # Now it is the only one.
            assert models.post("/v1/embeddings", input="a").status_code == 200
            (models.folder / "models.json").write_text("models: [")
            models.frontend.send_signal(signal.SIGHUP)
            wait_for_line(models.log, "the models stay as they are", process=models.frontend)
            assert models.post("/v1/embeddings", input="a").status_code == 200
            models.serve(pictures, {**texts, "served_model_names": [TEXTS, "another"]}, reranker)
            for name in (TEXTS, RERANKER):
                models.wait(name)
            assert width(models.post("/v1/embeddings", model="another", input="a")) == TINY.hidden
            broken = listing("broken", models.folder, 3)
            models.serve(pictures, texts, reranker, broken)
            wait_until(
                lambda: "cannot be opened" in models.health("broken").get("status", ""),
                process=models.frontend,
            )
            assert models.post("/v1/embeddings", model="broken", input="a").status_code == 503
            models.serve(pictures, texts, reranker)
            models.wait("broken", status=None)
        finally:
            done.set()
    assert [one.result() for one in asking] == [None, None] and statuses == {200}
    metrics = httpx.get(f"{models.url}/metrics").text
    gauges = [line for line in metrics.splitlines() if line.startswith("tessera_workers{")]
    assert len(gauges) == 6 and not any("later" in line or "broken" in line for line in gauges)


def test_a_flood_on_one_model_refuses_nobody_who_asks_another(models: Several) -> None:
    """Its worker is frozen, so that nothing of the flood is ever done."""
    victim = models.workers[TEXTS].pid
    text = "word " * 1000

    def flood(_: int) -> int:
        try:
            body = {"model": TEXTS, "input": [text] * 100}
            # Once the first of them are tokenised they fill the model's room: seconds on a busy machine.
            return httpx.post(f"{models.url}/v1/embeddings", json=body, timeout=15).status_code
        except httpx.TimeoutException:
            return 0

    freeze(victim)
    with ThreadPoolExecutor(64) as pool:
        answers = [pool.submit(flood, number) for number in range(256)]
        others = [
            models.post("/v1/embeddings", model=PICTURES, input=f"beside a flood {number}").status_code
            for number in range(20)
        ]
        refused = [answer.result() for answer in answers]
    signal_process(victim, signal.SIGCONT)
    assert others == [200] * 20
    # A worker that stands still is set aside after some seconds: then there is none, 503.
    assert refused.count(429) + refused.count(503) > 100 and set(refused) <= {0, 429, 503}
    models.wait(TEXTS)
