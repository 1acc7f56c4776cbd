"""Every path gives the vectors of the reference: both launch scripts, each transport, miss and hit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI

from tests.e2e.disaggregated import Disaggregated
from tests.e2e.inputs import Case, cases, cosine, parts
from tests.e2e.service import MODEL, Service, launch
from tests.references.llama_nemotron_vl import Reference
from tests.waiting import wait_until

pytestmark = pytest.mark.service

PATHS = {
    "agg": ("agg.sh", 1, None),
    "e_p auto": ("e_p.sh", 2, "shm"),
    "e_p shm": ("e_p.sh", 2, "shm"),
    "e_p nixl": ("e_p.sh", 2, "nixl"),
    "e_p inline": ("e_p.sh", 2, "inline"),
}


@dataclass(frozen=True, slots=True)
class Served:
    """A service, and the key that opens it where it is closed."""

    running: Service
    key: str = "none"


def _param(name: str) -> Any:
    # With the defaults of the launch script it is what other tests start anyway.
    marks = [pytest.mark.xdist_group("shared-service")] if name == "e_p auto" else []
    return pytest.param(name, marks=marks, id=name.replace(" ", "-"))


@pytest.fixture(scope="module", params=[_param(name) for name in PATHS])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(
    path: str, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Served]:
    if path == "e_p auto":
        shared: Disaggregated = request.getfixturevalue("service")
        yield Served(shared.running, shared.key)
        return
    script, workers, _ = PATHS[path]
    folder = tmp_path_factory.mktemp("service")
    environment = {}
    if path.startswith("e_p"):
        config = folder / "engine.yaml"
        config.write_text(f"transport:\n  kind: {path.split()[1]}\n")
        environment = {"TESSERA_ENCODE_ENGINE_ARGS": str(config), "TESSERA_EMBED_ENGINE_ARGS": str(config)}
    with launch(script, checkpoint, folder / "log", workers=workers, environment=environment) as running:
        yield Served(running)


@pytest.fixture(scope="module")
def fresh(path: str, photos: dict[str, bytes]) -> dict[str, bytes]:
    """The photographs as files that no cache has seen: what comes after a JPEG changes its hash alone."""
    return {name: data + b"\0" + path.encode() for name, data in photos.items()}


@pytest.fixture(scope="session")
def expected(photos: dict[str, bytes], reference: Reference) -> list[np.ndarray]:
    """The reference's vectors of ``cases``."""
    return [case.expected(reference) for case in cases(photos)]


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.running.url}/v1", api_key=served.key, max_retries=0) as made:
        yield made


def embed(client: OpenAI, inputs: list[Case]) -> np.ndarray:
    answer = client.embeddings.create(model=MODEL, input=[case.value for case in inputs])
    assert [row.index for row in answer.data] == list(range(len(inputs)))
    return np.array([row.embedding for row in answer.data], np.float32)


def test_alone_then_in_company(
    client: OpenAI, served: Served, path: str, fresh: dict[str, bytes], expected: list[np.ndarray]
) -> None:
    inputs, route = cases(fresh), PATHS[path][2]
    before = transfers(served.running, route)
    worst = 1.0
    # Alone and never seen before, alone and cached, all at once, all at once in the other order.
    for turn in ("miss", "hit"):
        for case, vector in zip(inputs, expected, strict=True):
            got = embed(client, [case])[0]
            worst = min(worst, cosine(got, vector))
            assert worst >= 0.9999, (turn, case.name, worst)
    for order in (1, -1):
        for case, got, vector in zip(
            inputs[::order], embed(client, inputs[::order]), expected[::order], strict=True
        ):
            worst = min(worst, cosine(got, vector))
            assert worst >= 0.9999, ("company", case.name, worst)
    if route is not None:
        made = [after - then for after, then in zip(transfers(served.running, route), before, strict=True)]
        assert made == [2, 2]

        def leases() -> float:
            return served.running.worker_metric(0, "tessera_slab_leases")

        # Of the shared service, another test's may still have to run out.
        assert path == "e_p auto" or not leases()
        wait_until(lambda: not leases())
    print(f"{path}: worst cosine {worst:.8f}")


def transfers(service: Service, route: str | None) -> tuple[float, float]:
    """How many images the embed worker was handed, by any route and by this one."""
    if route is None:
        return 0, 0
    name = "tessera_transfers_total"
    return service.worker_metric(1, name, outcome="ok"), service.worker_metric(1, name, route=route)


def test_different_images_give_different_vectors(client: OpenAI, photos: dict[str, bytes]) -> None:
    inputs = [case for case in cases(photos) if case.name in ("image", "other image")]
    one, other = embed(client, inputs)
    assert cosine(one, other) < 0.999


def test_usage_counts_cached_image_tokens(client: OpenAI, path: str, photos: dict[str, bytes]) -> None:
    image = photos["china"] + b"\0usage of " + path.encode()
    usages = [
        client.embeddings.create(model=MODEL, input=[parts(None, image)]).usage.model_dump() for _ in range(2)
    ]
    details = [usage["prompt_tokens_details"] for usage in usages]
    assert [one["image_tokens"] for one in details] == [7 * 64, 7 * 64]
    assert [one["cached_tokens"] for one in details] == [0, 7 * 64]
    assert (
        usages[0]["prompt_tokens"]
        == usages[0]["total_tokens"]
        == sum(details[0][name] for name in ("text_tokens", "image_tokens"))
    )


def test_encoding_formats_agree(client: OpenAI) -> None:
    as_floats = (
        client.embeddings.create(model=MODEL, input="hello", encoding_format="float").data[0].embedding
    )
    as_base64 = embed(client, [Case("text", "hello", "hello", (), "none")])[0]
    np.testing.assert_allclose(as_floats, as_base64, atol=1e-7)
    np.testing.assert_allclose(np.linalg.norm(as_base64), 1.0, atol=1e-5)


def test_messages_are_one_input(served: Served, photos: dict[str, bytes], reference: Reference) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": parts("a red flower", photos["flower"])}],
    }
    headers = {"authorization": f"Bearer {served.key}"}
    answer = httpx.post(f"{served.running.url}/v1/embeddings", json=body, headers=headers).json()
    (row,) = answer["data"]
    expected = reference.vector("a red flower", [photos["flower"]], "passage")
    assert cosine(np.array(row["embedding"], np.float32), expected) >= 0.9999
