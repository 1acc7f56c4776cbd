"""A family that is only installed, not built in, is served by every process without a change to any."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from openai import OpenAI

from tests.e2e.inputs import cosine, parts
from tests.e2e.service import MODEL, Service, launch
from tests.families.dual_encoder import install, make_checkpoint, reference

pytestmark = pytest.mark.service

SEED = 7


@pytest.fixture(scope="module", params=[("agg.sh", 1), ("e_p.sh", 2)], ids=["agg", "e_p"])
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    script, workers = request.param
    folder = tmp_path_factory.mktemp("family")
    path = install(folder / "site")
    checkpoint = make_checkpoint(folder / "checkpoint", SEED)
    with launch(
        script, checkpoint, folder / "log", workers=workers, environment={"PYTHONPATH": path}
    ) as running:
        yield running


def test_text_images_and_both(service: Service, photos: dict[str, bytes]) -> None:
    china, flower = photos["china"], photos["flower"]
    wanted = [("hello", ()), ("", (china,)), ("a flower", (flower,)), ("both", (china, flower))]
    inputs = [parts(text or None, *images) if images else text for text, images in wanted]
    with OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        for _ in range(2):
            answer = client.embeddings.create(model=MODEL, input=inputs)
            for row, (text, images) in zip(answer.data, wanted, strict=True):
                assert cosine(np.array(row.embedding, np.float32), reference(SEED, text, images)) > 0.9999
        assert answer.usage.model_dump()["prompt_tokens_details"]["cached_tokens"] == 4


def test_a_crashing_decoder_fails_its_own_input(service: Service, photos: dict[str, bytes]) -> None:
    pids, flower = service.pids(), photos["flower"]
    for _ in range(4):
        inputs = [parts("good", photos["china"]), parts("bad", flower, flower + b"CRASH"), "text"]
        answer = httpx.post(
            f"{service.url}/v1/embeddings", json={"input": inputs, "partial": True}, timeout=30
        ).json()
        good, bad, text = answer["data"]
        assert (bad["error"]["code"], bad["error"]["param"]) == ("decode_failed", "input[1][1].image_url.url")
        assert "crashed" in bad["error"]["message"]
        for row, expected in ((good, ("good", (photos["china"],))), (text, ("text", ()))):
            assert cosine(np.array(row["embedding"], np.float32), reference(SEED, *expected)) > 0.9999
    whole = httpx.post(f"{service.url}/v1/embeddings", json={"input": inputs}, timeout=60)
    assert (whole.status_code, whole.json()["error"]["param"]) == (422, "input[1][1].image_url.url")
    assert service.pids() == pids
    assert service.worker_metric(0, "tessera_decoder_losses_total", why="crash") >= 5
