"""Damaged requests by the hundred; ``python -m tests.clients.fuzz`` sends them by the hundred thousand.

``TESSERA_FUZZ_CASES`` is their number here, ``TESSERA_FUZZ_SEED`` where they begin.
"""

from __future__ import annotations

import os

import pytest

from tests.clients.conftest import ClosedService
from tests.clients.footprint import footprints, growth
from tests.clients.fuzz import send, width

pytestmark = [pytest.mark.service, pytest.mark.fuzzes]

CASES = int(os.environ.get("TESSERA_FUZZ_CASES", "400"))
SEED = int(os.environ.get("TESSERA_FUZZ_SEED", "0"))


@pytest.mark.timeout(max(120, CASES // 10))
async def test_nothing_breaks_it(service: ClosedService) -> None:
    pids = service.running.pids()
    hidden = width(service.url, service.key)
    first = await send(service.url, service.key, seed=SEED, cases=CASES // 3, hidden=hidden)
    before = footprints(pids)
    rest = await send(service.url, service.key, seed=SEED + 1, cases=CASES - CASES // 3, hidden=hidden)
    statuses = first.statuses + rest.statuses
    print(f"{CASES} cases: {dict(statuses)}")
    assert first.failures + rest.failures == []
    assert statuses.total() == CASES
    assert statuses[200] > CASES // 50
    assert statuses[400] > CASES // 10
    assert service.running.pids() == pids
    assert not growth(before, footprints(pids))
