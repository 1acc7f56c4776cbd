"""Images that no decoder can read, among the requests of others."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.e2e.faults.conftest import Deployment
from tests.e2e.faults.test_processes import whole
from tests.e2e.faults.traffic import PAUSE, Known, picture, traffic
from tests.e2e.inputs import parts
from tests.e2e.service import MODEL

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("faults")]


async def test_poison_in_every_batch_fails_its_own_requests(
    deployment: Deployment, known: list[Known]
) -> None:
    await whole(deployment)
    async with (
        traffic(deployment.urls, known, pause=PAUSE) as running,
        httpx.AsyncClient(timeout=60) as client,
    ):
        # The header is right, so that only the encode worker finds out.
        broken = [picture(12_000 + number, 200)[:4000] for number in range(40)]
        answers = await asyncio.gather(
            *(
                client.post(
                    f"{deployment.urls[number % 2]}/v1/embeddings",
                    json={"model": MODEL, "input": ["beside it", parts("poison", data)]},
                )
                for number, data in enumerate(broken)
            )
        )
    assert running.errors == [] and running.answered
    for answer in answers:
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].startswith("input[1]")
    await whole(deployment)
