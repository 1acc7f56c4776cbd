"""Vision rows that the client brings along, through a running service."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import save

from tests.clients.conftest import ClosedService
from tests.e2e.inputs import cosine, parts
from tests.proc import open_files
from tests.references.llama_nemotron_vl import Reference

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def rows(reference: Reference, photos: dict[str, bytes]) -> torch.Tensor:
    return reference.vision_rows(reference.tiles(photos["flower"]))


def inline(data: bytes) -> str:
    return base64.b64encode(data).decode()


def embed(http: httpx.Client, content: list[dict[str, Any]]) -> httpx.Response:
    return http.post("/v1/embeddings", json={"input": [content]})


def by_url(url: str) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}}]


def by_embeds(value: str) -> list[dict[str, Any]]:
    return [{"type": "image_embeds", "image_embeds": value}]


def test_rows_count_as_the_image_they_came_from(
    http: httpx.Client, service: ClosedService, rows: torch.Tensor, photos: dict[str, bytes]
) -> None:
    data = save({"embeddings": rows})
    (service.media / "flower.safetensors").write_bytes(data)
    image = embed(http, parts("a flower", photos["flower"])).json()
    handed_over = service.running.worker_metric(0, "tessera_transfers_total", route="shm", outcome="ok")
    text = [{"type": "text", "text": "a flower"}]
    for content in (
        by_url(str(service.media / "flower.safetensors")),
        by_url(f"file://{service.media}/flower.safetensors"),
        by_url("data:application/octet-stream;base64," + inline(data)),
        by_embeds(inline(data)),
        by_embeds(inline(save({"embeddings": rows[None]}))),
    ):
        answer = embed(http, content + text).json()
        assert answer["usage"]["prompt_tokens"] == image["usage"]["prompt_tokens"]
        found, expected = (np.array(body["data"][0]["embedding"], np.float32) for body in (answer, image))
        assert cosine(found, expected) >= 0.9999
    # Not in a message: each was lent, read and given back.
    after = service.running.worker_metric(0, "tessera_transfers_total", route="shm", outcome="ok")
    assert after == handed_over + 5
    assert "tessera_lent_bytes 0.0" in http.get("/metrics").text
    for pid in service.running.pids():
        assert not [name for name in open_files(pid) if "tessera-slab" in name]
        assert "tessera-slab" not in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 255, 300])
def test_any_number_of_rows(
    http: httpx.Client, rows: torch.Tensor, reference: Reference, count: int, dtype: torch.dtype
) -> None:
    given = rows[:count].to(dtype)
    answer = embed(http, [*by_embeds(inline(save({"a": given}))), {"type": "text", "text": "hi"}]).json()
    tokens = reference.tokens("hi", [1], "passage")
    placeholder = reference.config["img_context_token_id"]
    first = tokens.index(placeholder)
    tokens = [*tokens[:first], *[placeholder] * count, *(t for t in tokens[first:] if t != placeholder)]
    expected = reference.pooled(reference.last_hidden(reference.fused(tokens, [given.float()]))).numpy()
    assert cosine(np.array(answer["data"][0]["embedding"], np.float32), expected) >= 0.9999
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == count
    assert answer["usage"]["prompt_tokens"] == len(tokens)


def test_rows_beside_images(http: httpx.Client, rows: torch.Tensor, photos: dict[str, bytes]) -> None:
    data = inline(save({"a": rows}))
    images = embed(http, parts("x", photos["flower"], photos["china"])).json()
    mixed = embed(http, by_embeds(data) + parts("x", photos["china"])).json()
    found, expected = (np.array(body["data"][0]["embedding"], np.float32) for body in (mixed, images))
    assert cosine(found, expected) >= 0.9999


def crafted(header: dict[str, Any] | bytes, body: bytes = b"") -> str:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return inline(len(text).to_bytes(8, "little") + text + body)


def test_malformed_files_are_refused(http: httpx.Client, rows: torch.Tensor) -> None:
    hidden = rows.shape[1]
    good = {"dtype": "F32", "shape": [1, hidden], "data_offsets": [0, 4 * hidden]}
    body = bytes(4 * hidden)
    nan = torch.full((1, hidden), float("nan"))
    huge = torch.full((1, hidden), 1e30)
    cases: dict[str, tuple[str, int]] = {
        "no safetensors": (inline(b"hello there"), 400),
        "empty header": (crafted({}), 400),
        "only metadata": (crafted({"__metadata__": {"a": "b"}}), 400),
        "no JSON": (crafted(b"{nonsense}"), 400),
        "header beyond the file": (inline((1 << 40).to_bytes(8, "little") + b"{}"), 400),
        "another width": (inline(save({"a": torch.zeros(4, hidden + 1)})), 400),
        "one axis": (inline(save({"a": torch.zeros(hidden)})), 400),
        "a batch of two": (inline(save({"a": torch.zeros(2, 3, hidden)})), 400),
        "no rows": (crafted({"a": good | {"shape": [0, hidden], "data_offsets": [0, 0]}}), 400),
        "whole numbers": (inline(save({"a": torch.zeros(4, hidden, dtype=torch.int32)})), 415),
        "double": (inline(save({"a": torch.zeros(4, hidden, dtype=torch.float64)})), 415),
        "offsets beyond the file": (crafted({"a": good | {"data_offsets": [8, 8 + 4 * hidden]}}, body), 400),
        "offsets backwards": (crafted({"a": good | {"data_offsets": [4 * hidden, 0]}}, body), 400),
        "negative": (crafted({"a": good | {"shape": [-1, -hidden]}}, body), 400),
        "huge shape": (crafted({"a": good | {"shape": [2**40, hidden]}}, body), 400),
        "shape is no list": (crafted({"a": good | {"shape": "ab"}}, body), 400),
        "not a number": (inline(save({"a": nan})), 400),
        "infinite in bfloat16": (inline(save({"a": torch.full((1, hidden), float("inf")).bfloat16()})), 400),
        "beyond float16": (inline(save({"a": huge})), 400),
        "too many tokens": (inline(save({"a": torch.zeros(20_000, hidden, dtype=torch.float16)})), 400),
    }
    for name, (value, status) in cases.items():
        answer = embed(http, by_embeds(value))
        assert answer.status_code == status, (name, answer.text)
        assert answer.json()["error"]["param"].startswith("input[0]"), name
    assert embed(http, by_embeds(crafted({"a": good}, body))).status_code == 200


def test_files_that_are_not_read(
    http: httpx.Client, service: ClosedService, rows: torch.Tensor, tmp_path: Path
) -> None:
    for name in ("a.pt", "a.pth", "a.bin", "A.PT"):
        torch.save(rows, service.media / name)
        answer = embed(http, by_url(str(service.media / name)))
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media")
        assert "pickle" in answer.json()["error"]["message"]
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(save({"a": rows}))
    link = service.media / "link.safetensors"
    link.symlink_to(outside)
    missing = service.media / "missing.safetensors"
    for path in (outside, link, missing, service.media / ".." / "log"):
        answer = embed(http, by_url(str(path)))
        assert answer.status_code == 422
        assert "no readable file below the allowed directory" in answer.json()["error"]["message"]
    large = service.media / "large.safetensors"
    large.write_bytes(bytes(9 << 20))
    assert embed(http, by_url(str(large))).status_code == 413
    assert embed(http, by_url("https://example.com/a.safetensors")).status_code == 415
    fake = service.media / "fake.safetensors"
    fake.write_bytes(b"\x89PNG\r\n\x1a\n")
    assert embed(http, by_url(str(fake))).status_code == 400
