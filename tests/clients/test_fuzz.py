"""Damaged requests by the hundred, or in a nightly run by the hundred thousand: no 5xx, no growth.

``TESSERA_FUZZ_CASES`` is their number, ``TESSERA_FUZZ_SEED`` where they begin.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.clients.conftest import ClosedService
from tests.clients.mutations import Mutator

pytestmark = pytest.mark.e2e

CASES = int(os.environ.get("TESSERA_FUZZ_CASES", "400"))
SEED = int(os.environ.get("TESSERA_FUZZ_SEED", "0"))
CLIENTS = 8
# What a process may gain after it has seen a third of the cases: allocators keep some slack, a leak of one
# small image for each request would be several times this in the nightly run.
GROWTH_BYTES = 48 << 20


def resident(pids: list[int]) -> dict[int, int]:
    found = {}
    for pid in pids:
        line = next(
            line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")
        )
        found[pid] = int(line.split()[1]) << 10
    return found


@pytest.mark.timeout(max(120, CASES // 10))
async def test_nothing_breaks_it(service: ClosedService) -> None:
    pids = service.running.pids()
    with service.http() as http:
        hidden = len(http.post("/v1/embeddings", json={"input": "x"}).json()["data"][0]["embedding"])
    mutator = Mutator(SEED, hidden)
    statuses: Counter[int] = Counter()
    left = CASES
    before: dict[int, int] = {}

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal left, before
        while left > 0:
            left -= 1
            if left == CASES * 2 // 3:
                before = resident(pids)
            path, body = mutator.request()
            answer = await http.post(path, content=body, headers={"content-type": "application/json"})
            statuses[answer.status_code] += 1
            assert answer.status_code < 500, (path, answer.text, body[:3000])
            if answer.headers["content-type"] == "application/json":
                answer.json()

    headers = {"authorization": f"Bearer {service.key}"}
    async with httpx.AsyncClient(base_url=service.url, headers=headers, timeout=60) as http:
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(client(http))
        assert (await http.get("/health")).status_code == 200
    print(f"{CASES} cases: {dict(statuses)}")
    assert sum(statuses.values()) == CASES
    assert statuses[200] > CASES // 50
    assert statuses[400] > CASES // 10
    assert service.running.pids() == pids
    after = resident(pids)
    grown = {pid: after[pid] - before[pid] for pid in pids}
    assert max(grown.values()) < GROWTH_BYTES, grown
