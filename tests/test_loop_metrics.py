"""The metric of background loops."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tessera.loop_metrics import LoopFailures
from tessera.tasks import KEEPER


def test_two_registries_of_a_process_show_the_same_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    registries = [CollectorRegistry(), CollectorRegistry()]
    for registry in registries:
        registry.register(LoopFailures())
    # Counted behind both, as a loop that is started late is.
    monkeypatch.setitem(KEEPER.failures, "discovery", 3)
    for registry in registries:
        assert 'tessera_loop_failures_total{loop="discovery"} 3.0' in generate_latest(registry).decode()
