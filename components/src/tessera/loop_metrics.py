"""The metric of background loops, which every kind of process has."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from tessera.tasks import KEEPER


class LoopFailures(Collector):
    """Shows how often rounds of this process's background loops have failed.

    It reads the keeper's counts, so that several registries of one process show the same: a worker that
    serves Dynamo's own frontend has two.
    """

    def describe(self) -> Iterable[Metric]:
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "tessera_loop_failures",
            "Rounds of a background loop that failed and were tried again",
            labels=["loop"],
        )
        for name, count in KEEPER.failures.items():
            family.add_metric([name], count)
        yield family
