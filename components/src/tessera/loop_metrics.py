"""The metric of background loops, which every kind of process has."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from tessera.tasks import KEEPER


def count_loop_failures(registry: CollectorRegistry) -> None:
    """Count in ``registry`` the rounds of this process's background loops that fail from now on."""
    failures = Counter(
        "tessera_loop_failures",
        "Rounds of a background loop that failed and were tried again",
        ["loop"],
        registry=registry,
    )
    KEEPER.on_failure = lambda name: failures.labels(name).inc()
