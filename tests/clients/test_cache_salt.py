"""What is cached of one sender is not there for another, by key and by ``cache_salt``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.inputs import data_url
from tests.e2e.service import Service, launch

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("clients")]

KEYS = {name: f"sk-{name}-0123456789abcdef" for name in ("alice", "bob")}


@pytest.fixture(scope="module")
def service(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    environment = {
        "TESSERA_FRONTEND_ARGS": "--cache-by-key --result-cache-mb 1",
        "TESSERA_API_KEYS": ",".join(KEYS.values()),
    }
    log = tmp_path_factory.mktemp("salted") / "log"
    with launch("agg.sh", checkpoint, log, workers=1, environment=environment) as running:
        yield running


def computed(service: Service) -> float:
    return service.worker_metric(0, "tessera_items_total", stage="embed", outcome="ok")


def ask(service: Service, key: str, body: dict[str, Any], path: str = "/v1/embeddings") -> dict[str, Any]:
    answer = httpx.post(f"{service.url}{path}", json=body, headers={"x-api-key": KEYS[key]}, timeout=30)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> bool:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("salts", [("", ""), ("a", "b")], ids=["by key", "by key and salt"])
def test_an_image_of_one_key_is_new_to_another(
    service: Service, photos: dict[str, bytes], salts: tuple[str, str]
) -> None:
    # With a text of its own each time, so that its vector is computed and its rows are looked up.
    def image(key: str, text: str, salt: str) -> dict[str, Any]:
        body = {"input": [{"text": text, "image": data_url(photos["china"])}], "cache_salt": salt or None}
        return ask(service, key, body)

    first, second = salts
    assert not cached(image("alice", f"one {salts}", first))
    assert cached(image("alice", f"two {salts}", first))
    assert not cached(image("bob", f"one {salts}", second))
    assert cached(image("bob", f"two {salts}", second))
    if second:
        assert not cached(image("bob", f"three {salts}", first))


def test_a_text_of_one_key_or_salt_is_computed_for_another(service: Service) -> None:
    before = computed(service)
    vectors = []
    for key, salt, more in (
        ("alice", None, 1),
        ("alice", None, 1),
        ("bob", None, 2),
        ("bob", "x", 3),
        ("bob", "x", 3),
        ("alice", "x", 4),
    ):
        answer = ask(service, key, {"input": "who has sent this?", "cache_salt": salt})
        assert computed(service) == before + more
        vectors.append(answer["data"][0]["embedding"])
    assert all(vector == vectors[0] for vector in vectors)


def test_routes_of_scores_take_a_salt(service: Service) -> None:
    body = {"query": "a", "documents": ["b", "c"], "cache_salt": "x"}
    assert len(ask(service, "alice", body, "/v1/rerank")["results"]) == 2


@pytest.mark.parametrize("salt", ["", "x" * 257, 7, ["x"]])
def test_what_is_no_salt_is_refused(service: Service, salt: object) -> None:
    answer = httpx.post(
        f"{service.url}/v1/embeddings",
        json={"input": "a", "cache_salt": salt},
        headers={"x-api-key": KEYS["alice"]},
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "cache_salt")
    assert "1 to 256 characters" in error["message"]
