"""Requests at their limits, of a running service: what must not be taken for an attack."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest

from tests.e2e.disaggregated import Disaggregated

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("shared-service")]

MOST_INPUTS = 8192


def rows(service: Disaggregated, **body: Any) -> list[dict[str, Any]]:
    answer = httpx.post(
        f"{service.url}/v1/embeddings",
        json=body,
        headers={"authorization": f"Bearer {service.key}"},
        timeout=120,
    )
    return answer.raise_for_status().json()["data"]  # type: ignore[no-any-return]


def test_a_text_of_brackets_is_a_text(service: Disaggregated) -> None:
    text = "[{" * 150_000
    (whole,) = rows(service, input=text, truncate="END")
    (beginning,) = rows(service, input=text[:20_000], truncate="END")
    assert np.allclose(whole["embedding"], beginning["embedding"], atol=1e-6)


def test_as_many_lists_of_token_ids_as_a_request_may_have(service: Disaggregated) -> None:
    found = rows(service, input=[[5, 6 + number % 7] for number in range(MOST_INPUTS)])
    assert len(found) == MOST_INPUTS
    assert np.allclose(found[0]["embedding"], found[7]["embedding"], atol=1e-6)


def test_as_many_conversations_as_a_request_may_have(service: Disaggregated) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    last = {"role": "assistant", "content": [{"type": "text", "text": ""}]}
    asked = [{"role": "user", "content": parts}, last]
    assert len(rows(service, messages=[asked] * MOST_INPUTS)) == MOST_INPUTS


def test_one_string_that_is_no_text_fails_alone(service: Disaggregated) -> None:
    answer = httpx.post(
        f"{service.url}/v1/embeddings",
        content=b'{"input": ["ok", "x\\ud83d", "caf\xe9", [5, 6]], "partial": true}',
        headers={"authorization": f"Bearer {service.key}"},
    )
    found = answer.raise_for_status().json()["data"]
    assert [row["embedding"] is None for row in found] == [False, True, True, False]
    assert [row["error"]["param"] for row in found[1:3]] == ["input[1]", "input[2]"]
