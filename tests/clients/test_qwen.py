"""Qwen's embedding models as clients of other servers ask them: instructions, order, grids, widths."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI
from safetensors.numpy import save

from tessera_tools.random_checkpoint import qwen3
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tests.e2e.inputs import cosine, data_url
from tests.e2e.service import MODEL, Service, launch

pytestmark = pytest.mark.service

FIND = "Retrieve images that show what the text says"
PAD = "<|image_pad|>"


def reference_tokenizer(checkpoint: Path) -> Any:
    """The tokenizer of transformers, imported late: each process that collects would spend a second on it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("qwen")
    for family, spec in (("qwen3_embedding", qwen3.TINY), ("qwen3_vl_embedding", qwen3.VL_TINY)):
        write_checkpoint(folder / family, spec, seed=0)
    return {made.name: made for made in folder.iterdir()}


@pytest.fixture(scope="module")
def vision(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    log = tmp_path_factory.mktemp("vision") / "log"
    with launch("e_p.sh", checkpoints["qwen3_vl_embedding"], log, workers=2) as running:
        yield running


@pytest.fixture(scope="module")
def text(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    log = tmp_path_factory.mktemp("text") / "log"
    with launch("agg.sh", checkpoints["qwen3_embedding"], log, workers=1) as running:
        yield running


def embed(service: Service, **body: Any) -> np.ndarray:
    answer = httpx.post(f"{service.url}/v1/embeddings", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return np.array([row["embedding"] for row in answer.json()["data"]], np.float32)


def tokens(service: Service, **body: Any) -> list[int]:
    answer = httpx.post(f"{service.url}/tokenize", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["tokens"]
    return found


def shown(photos: dict[str, bytes], name: str = "flower") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(photos[name])}}


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def test_a_conversation_as_vllms_clients_send_it(
    vision: Service, checkpoints: dict[str, Path], photos: dict[str, bytes]
) -> None:
    """A system message, the user's parts and an empty turn of the assistant become the model's template."""
    messages = [
        {"role": "system", "content": [words(FIND)]},
        {"role": "user", "content": [shown(photos), words("a flower")]},
        {"role": "assistant", "content": [words("")]},
    ]
    more = {"continue_final_message": True, "add_special_tokens": True}
    found = tokens(vision, messages=messages, **more)
    reference = reference_tokenizer(checkpoints["qwen3_vl_embedding"])
    pads = found.count(reference.convert_tokens_to_ids(PAD))
    assert pads > 100
    prompt = (
        f"<|im_start|>system\n{FIND}.<|im_end|>\n<|im_start|>user\n<|vision_start|>{PAD * pads}<|vision_end|>"
        "a flower<|im_end|>\n<|im_start|>assistant\n<|endoftext|>"
    )
    assert found == reference(prompt, add_special_tokens=False)["input_ids"]
    with OpenAI(base_url=f"{vision.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.post(
            "/embeddings", body={"model": MODEL, "messages": messages, **more}, cast_to=dict[str, Any]
        )
    asked = np.array(answer["data"][0]["embedding"], np.float32)
    parts = [shown(photos), words("a flower")]
    for body in (
        {"input": [parts], "instruction": FIND},
        {"input": [parts], "instruction": f" {FIND}. "},
        {"input": [{"content": parts, "instruction": FIND}], "instruction": "another"},
        {"input": [{"text": "a flower", "image": data_url(photos["flower"]), "instruction": FIND}]},
        {"messages": [messages[:2]], "add_generation_prompt": True},
    ):
        assert cosine(embed(vision, **body)[0], asked) > 0.9999
    for body in ({"input": [parts]}, {"input": [parts], "instruction": "another"}):
        assert cosine(embed(vision, **body)[0], asked) < 0.9999


def test_texts_and_images_stand_in_the_clients_order(
    vision: Service, checkpoints: dict[str, Path], photos: dict[str, bytes]
) -> None:
    reference = reference_tokenizer(checkpoints["qwen3_vl_embedding"])
    pad = reference.convert_tokens_to_ids(PAD)
    orders = [
        [words("one"), shown(photos), words("two"), shown(photos, "china")],
        [shown(photos), words("one"), shown(photos, "china"), words("two")],
        [shown(photos, "china"), shown(photos), words("one"), words("two")],
    ]
    shapes = []
    for parts in orders:
        found = tokens(vision, input=[parts])
        runs = [
            token for token, before in zip(found, [-1, *found], strict=False) if (token, before) != (pad, pad)
        ]
        shapes.append(reference.decode(runs).partition("user\n")[2].partition("<|im_end|>")[0])
    image = f"<|vision_start|>{PAD}<|vision_end|>"
    assert shapes == [f"one{image}two{image}", f"{image}one{image}two", f"{image}{image}onetwo"]
    rows = embed(vision, input=orders)
    assert max(cosine(rows[0], rows[1]), cosine(rows[0], rows[2]), cosine(rows[1], rows[2])) < 0.9999


def test_a_clients_own_rows_need_their_grid(vision: Service) -> None:
    width = httpx.get(f"{vision.url}/status").json()["output"]["width"]
    described = httpx.get(f"{vision.url}/v1/models/{MODEL}").json()
    assert described["family"] == "qwen3_vl_embedding" and described["images"] is True
    # As wide as the main row and its DeepStack rows together; what the service says of a wrong width tells.
    wrong = base64.b64encode(save({"rows": np.zeros((6, width), np.float32)})).decode()
    refused = httpx.post(
        f"{vision.url}/v1/embeddings", json={"input": [[{"type": "image_embeds", "image_embeds": wrong}]]}
    ).json()
    row_width = int(refused["error"]["message"].partition("[tokens, ")[2].partition("]")[0])
    assert row_width % width == 0 and row_width > width
    values = np.random.default_rng(0).standard_normal((6, row_width)).astype(np.float32)
    bare = base64.b64encode(save({"rows": values})).decode()
    inside = base64.b64encode(save({"rows": values, "image_grid_thw": np.array([[1, 4, 6]])})).decode()

    def part(given: Any) -> list[dict[str, Any]]:
        return [{"type": "image_embeds", "image_embeds": given}, words("a flower")]

    beside = {"image_embeds": bare, "image_grid_thw": [1, 4, 6]}
    rows = embed(vision, input=[part(inside), part(beside), part({**beside, "image_grid_thw": [1, 6, 4]})])
    assert cosine(rows[0], rows[1]) > 0.9999 > cosine(rows[0], rows[2])
    for given in (bare, {**beside, "image_grid_thw": [1, 4, 8]}):
        answer = httpx.post(f"{vision.url}/v1/embeddings", json={"input": ["a", part(given)]})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].startswith("input[1]")
        assert "grid" in answer.json()["error"]["message"]


def test_any_width_between_two(vision: Service) -> None:
    (whole,) = embed(vision, input="a flower")
    for width in (64, 65, len(whole) - 1):
        if width >= len(whole):
            continue
        (cut,) = embed(vision, input="a flower", dimensions=width)
        assert cosine(cut, whole[:width]) > 0.9999
        assert np.linalg.norm(cut) == pytest.approx(1, abs=1e-4)
    answer = httpx.post(f"{vision.url}/v1/embeddings", json={"input": "a", "dimensions": 63})
    assert answer.status_code == 400
    assert f"64 to {len(whole)}" in answer.json()["error"]["message"]


def test_a_model_of_text_alone(text: Service, checkpoints: dict[str, Path], photos: dict[str, bytes]) -> None:
    assert httpx.get(f"{text.url}/health").json()["images"] is False
    refused = httpx.post(f"{text.url}/v1/embeddings", json={"input": [[shown(photos)]]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[0][0].image_url.url")
    reference = reference_tokenizer(checkpoints["qwen3_embedding"])

    def ids(prompt: str) -> list[int]:
        found: list[int] = reference(f"{prompt}<|endoftext|>", add_special_tokens=False)["input_ids"]
        return found

    asked = f"Instruct: {FIND}\nQuery:a flower"
    assert tokens(text, input="a flower") == ids("a flower")
    for body in (
        {"input": "a flower", "instruction": FIND},
        {"input": "a flower", "instruction": FIND, "input_type": "query"},
        {"messages": [{"role": "system", "content": FIND}, {"role": "query", "content": "a flower"}]},
        # What clients send who write the template themselves.
        {"prompt": asked},
    ):
        assert tokens(text, **body) == ids(asked), body
    for named in ("query", "document"):
        by_tei = httpx.post(f"{text.url}/embed", json={"inputs": "a flower", "prompt_name": named}).json()
        (by_openai,) = embed(text, input="a flower", input_type=named)
        assert cosine(np.array(by_tei[0], np.float32), by_openai) > 0.9999
