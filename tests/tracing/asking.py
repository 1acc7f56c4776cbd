"""Requests to a running service whose traces go to a collector."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from tests.e2e.service import MODEL
from tests.tracing.collector import Collector, Exported


@dataclass(frozen=True, slots=True)
class Asked:
    """``trace`` and ``span`` are what the client said; the answer is not checked."""

    trace: str
    span: str
    answer: httpx.Response


@dataclass(frozen=True, slots=True)
class Asker:
    """A client that traces its own work."""

    http: httpx.Client
    collector: Collector

    def post(self, *inputs: Any, path: str = "/v1/embeddings", kept: bool = True) -> Asked:
        trace, span = secrets.token_hex(16), secrets.token_hex(8)
        answer = self.http.post(
            path,
            json={"model": MODEL, "input": inputs},
            headers={"traceparent": f"00-{trace}-{span}-0{int(kept)}"},
        )
        return Asked(trace, span, answer)

    def traced(self, *inputs: Any, path: str = "/v1/embeddings") -> list[Exported]:
        """The trace of a request that is answered with vectors, once all of it has arrived."""
        asked = self.post(*inputs, path=path)
        asked.answer.raise_for_status()
        self.collector.wait(lambda spans: _complete(asked, spans))
        return self.collector.trace(asked.trace)

    def together(self, requests: int) -> tuple[Exported, list[Asked]]:
        """A batch that several requests, sent at the same time, have ridden in; and these requests."""
        with ThreadPoolExecutor(requests + 1) as threads:
            for _ in range(20):
                # What comes while the engine is busy becomes one batch.
                threads.submit(self.post, *["word " * 400] * 8)
                asked = list(threads.map(self.post, (f"text {index}" for index in range(requests))))
                largest = max((self._batch(one) for one in asked), key=lambda span: len(span.links))
                riders = [one for one in asked if one.trace in {trace for trace, _ in largest.links}]
                if len(riders) > 1:
                    return largest, riders
        raise AssertionError("no two requests met in a batch")

    def _batch(self, asked: Asked) -> Exported:
        """The batch that a request of one text was in."""
        asked.answer.raise_for_status()
        self.collector.wait(lambda spans: _complete(asked, spans))
        (engine,) = (span for span in self.collector.trace(asked.trace) if span.name == "text engine")
        (batch,) = engine.links
        self.collector.wait(lambda spans: batch in {(span.trace, span.span) for span in spans})
        return next(span for span in self.collector.all() if (span.trace, span.span) == batch)


def _complete(asked: Asked, spans: Sequence[Exported]) -> bool:
    """Whether the first span, which ends last in its process, has arrived, and with each call its answer."""
    own = [span for span in spans if span.trace == asked.trace]
    parents = {span.parent for span in own}
    calls = {span.span for span in own if span.kind == "client" and "rpc.method" in span.attributes}
    return asked.span in parents and calls <= parents
