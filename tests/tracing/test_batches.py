"""A batch's own trace and its links, with an engine that the test holds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tessera import tracing
from tessera.batching import Batcher, Events
from tessera.engine.batch import packed_cost
from tessera.errors import EngineFailed
from tests.batching.engines import HeldEngine
from tests.tracing.collector import Collector, Exported

KEPT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
ALSO_KEPT = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
NOT_KEPT = {"traceparent": "00-5bf92f3577b34da6a3ce929d0e0e4737-00f067aa0ba902b8-00"}


async def one_batch(engine: HeldEngine, requests: Sequence[tuple[dict[str, str], list[int]]]) -> list[object]:
    """Submit all payloads while the engine is busy with something else, so that they become one batch."""

    def describe(payloads: Sequence[int]) -> tracing.Attributes:
        return {"test.sum": sum(payloads)}

    batcher: Batcher[int, int] = Batcher(
        "held",
        engine.launch,
        cost=packed_cost,
        budget=100,
        max_queued=1000,
        depth=1,
        events=Events(attributes=describe),
    )
    engine.gate.clear()
    waiting = [batcher.submit(1000, 1)]
    await asyncio.to_thread(engine.entered.acquire)
    for carrier, payloads in requests:
        with tracing.serve("request", carrier):
            waiting += [batcher.submit(payload, 1) for payload in payloads]
    engine.gate.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    await batcher.close()
    return [getattr(result, "value", result) for result in results[1:]]


def named(collector: Collector, name: str) -> list[Exported]:
    return [span for span in collector.all() if span.name == name]


async def test_a_batch_links_to_every_request_and_is_linked_from_each(collector: Collector) -> None:
    engine = HeldEngine()
    assert await one_batch(engine, [(KEPT, [1, 2]), (ALSO_KEPT, [3])]) == [-1, -2, -3]
    tracing.stop()
    requests = named(collector, "request")
    (batch,) = named(collector, "held batch")
    assert set(batch.links) == {(span.trace, span.span) for span in requests}
    assert batch.parent == "" and batch.trace not in {span.trace for span in requests}
    assert batch.attributes == {"tessera.batch.entries": 3, "test.sum": 6}
    shares = {span.parent: span for span in named(collector, "held engine")}
    queues = {span.parent: span for span in named(collector, "held queue")}
    assert shares.keys() == queues.keys() == {span.span for span in requests}
    for request, share in zip(requests, (2, 1), strict=True):
        ran, waited = shares[request.span], queues[request.span]
        assert ran.trace == waited.trace == request.trace
        assert ran.links == ((batch.trace, batch.span),)
        assert ran.attributes["tessera.batch.share"] == share
        assert ran.milliseconds == batch.milliseconds
        assert waited.milliseconds >= 0


async def test_what_is_not_kept_leaves_nothing_in_a_batch_that_is(collector: Collector) -> None:
    await one_batch(HeldEngine(), [(KEPT, [1]), (NOT_KEPT, [2])])
    tracing.stop()
    (request,) = named(collector, "request")
    (batch,) = named(collector, "held batch")
    assert batch.links == ((request.trace, request.span),)
    assert batch.attributes["tessera.batch.entries"] == 2
    assert len(named(collector, "held engine")) == len(named(collector, "held queue")) == 1


async def test_a_batch_of_nobody_who_is_kept_leaves_nothing(collector: Collector) -> None:
    await one_batch(HeldEngine(), [(NOT_KEPT, [1, 2])])
    tracing.stop()
    assert collector.all() == []


async def test_a_kept_request_keeps_its_batch_whatever_the_sampler_says(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracing.stop()
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    tracing.start("test", ["otlp"])
    await one_batch(HeldEngine(), [(KEPT, [1]), ({}, [2])])
    tracing.stop()
    (request,) = named(collector, "request")
    (batch,) = named(collector, "held batch")
    assert batch.links == ((request.trace, request.span),)


async def test_a_failed_batch_and_its_halves_say_what_failed(collector: Collector) -> None:
    engine = HeldEngine(poison={2})
    _, failed = await one_batch(engine, [(KEPT, [1]), (ALSO_KEPT, [2])])
    assert isinstance(failed, EngineFailed)
    tracing.stop()
    whole, good, bad = sorted(named(collector, "held batch"), key=lambda span: span.started)
    assert [len(span.links) for span in (whole, good, bad)] == [2, 1, 1]
    assert [span.failed for span in (whole, good, bad)] == [True, False, True]
    assert bad.attributes["error.type"] == "RuntimeError"
    assert "cannot run" not in str(collector.all())
