"""What has been inferred, and where the time went, of all frontends of the group together."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from prometheus_client import Counter

from tessera.frontend.metrics import FrontendMetrics

STEPS: Final = ("queue", "compute_input", "compute_infer", "compute_output")


@dataclass(slots=True, kw_only=True)
class Spent:
    """Seconds of one call; ``batch`` is how many rows it had."""

    queue: float = 0.0
    compute_input: float = 0.0
    compute_infer: float = 0.0
    compute_output: float = 0.0
    batch: int = 0


class Statistics:
    """Counts by names that clients ask for, which are few: those of the models that are offered."""

    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics
        self._counts = Counter(
            "tessera_kserve_calls",
            "KServe calls that were answered (success) or failed (fail), and the rows of the former (rows)",
            ["model", "event"],
            registry=metrics.registry,
        )
        self._seconds = Counter(
            "tessera_kserve_nanoseconds",
            "Nanoseconds that KServe calls took: waiting, reading, with workers, writing; in all",
            ["model", "step"],
            registry=metrics.registry,
        )
        # Bound once: finding a series takes longer than counting in it.
        self._count = cache(self._counts.labels)
        self._add = cache(self._seconds.labels)
        self.last: dict[str, int] = {}
        """When each was last asked here, in milliseconds since 1970."""

    def succeed(self, model: str, spent: Spent, seconds: float) -> None:
        self.last[model] = int(time.time() * 1000)
        self._count(model, "success").inc()
        self._count(model, "rows").inc(spent.batch)
        self._add(model, "success").inc(_nanoseconds(seconds))
        for step in STEPS:
            self._add(model, step).inc(_nanoseconds(getattr(spent, step)))

    def fail(self, model: str, seconds: float) -> None:
        self._count(model, "fail").inc()
        self._add(model, "fail").inc(_nanoseconds(seconds))

    def of(self, model: str) -> dict[str, Any]:
        """Return what KServe's statistics of a model have, as JSON has it.

        Batches are made of the rows of many calls and not counted by model: each row counts as executed once.
        """
        counts = self._metrics.total("tessera_kserve_calls", "event", model=model)
        spent = self._metrics.total("tessera_kserve_nanoseconds", "step", model=model)
        events = {"success": "success", "fail": "fail", **dict.fromkeys(STEPS, "success")}
        return {
            "last_inference": self.last.get(model, 0),
            "inference_count": counts.get("rows", 0),
            "execution_count": counts.get("success", 0),
            "inference_stats": {
                step: {"count": counts.get(event, 0), "ns": spent.get(step, 0)}
                for step, event in events.items()
            },
        }


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
