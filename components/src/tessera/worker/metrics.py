"""What a worker counts; one registry for each process, rendered on the runtime's own ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tessera import wire
from tessera.batching import BatchStats
from tessera.cache import CacheStats
from tessera.transport.slab import SlabStats

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_SIZES = (1, 4, 16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


class WorkerMetrics:
    """Counters and histograms of one worker. Updated from its event loop."""

    def __init__(self) -> None:
        # A second series for each counter that says when it began; nobody asks for it.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        registry = self.registry
        self.items = Counter(
            "tessera_items", "Inputs or images answered", ["stage", "outcome"], registry=registry
        )
        self._entries = Histogram(
            "tessera_batch_entries", "Entries in a batch", ["stage"], buckets=_COUNTS, registry=registry
        )
        self._size = Histogram(
            "tessera_batch_size", "Tokens or tiles in a batch", ["stage"], buckets=_SIZES, registry=registry
        )
        self._stage = Histogram(
            "tessera_stage_seconds", "Time in a stage", ["stage"], buckets=_SECONDS, registry=registry
        )
        self.transfers = Counter(
            "tessera_transfers", "Vision hand-offs read", ["route", "outcome"], registry=registry
        )
        self.transfer_bytes = Counter(
            "tessera_transfer_bytes", "Vision rows read", ["route"], registry=registry
        )
        self.encode_calls = Counter(
            "tessera_encode_calls", "Calls to encode workers", ["outcome"], registry=registry
        )
        self.decoder_losses = Counter(
            "tessera_decoder_losses", "Image decoders that were replaced", ["why"], registry=registry
        )
        self._queued = Gauge("tessera_queued", "Tokens or tiles waiting", ["stage"], registry=registry)
        self._queues: dict[str, Callable[[], float]] = {}
        self._cache: Callable[[], CacheStats] | None = None
        self._slab: Callable[[], SlabStats] | None = None

    def batch(self, stage: str) -> Callable[[BatchStats], None]:
        """An observer for that stage's batcher."""
        entries, size, seconds = (
            self._entries.labels(stage),
            self._size.labels(stage),
            self._stage.labels(f"{stage}_batch"),
        )

        def observe(stats: BatchStats) -> None:
            entries.observe(stats.entries)
            size.observe(stats.size)
            seconds.observe(stats.run_ms / 1e3)

        return observe

    def time(self, stage: str, milliseconds: float) -> None:
        self._stage.labels(stage).observe(milliseconds / 1e3)

    def watch_queue(self, stage: str, read: Callable[[], float]) -> None:
        self._queues[stage] = read
        self._queued.labels(stage).set_function(read)

    def watch_cache(self, read: Callable[[], CacheStats]) -> None:
        self._cache = read
        self.registry.register(_CacheCollector(read))

    def watch_slab(self, read: Callable[[], SlabStats]) -> None:
        self._slab = read
        self.registry.register(_SlabCollector(read))

    def state(self) -> wire.WorkerState:
        """What the frontend's ``/status`` says of this worker."""
        cache, slab = self._cache and self._cache(), self._slab and self._slab()
        return wire.WorkerState(
            queued={stage: read() for stage, read in self._queues.items()},
            cache=None
            if cache is None
            else wire.CacheState(
                hits=cache.hits,
                misses=cache.misses,
                entries=cache.entries,
                nbytes=cache.nbytes,
                capacity_bytes=cache.capacity,
            ),
            slab=None
            if slab is None
            else wire.SlabState(
                used_bytes=slab.used_bytes, capacity_bytes=slab.capacity_bytes, leases=slab.leased
            ),
        )

    def render(self) -> str:
        return generate_latest(self.registry).decode()


class _CacheCollector(Collector):
    def __init__(self, read: Callable[[], CacheStats]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        stats = self._read()
        for name, text, value in (
            ("hits", "Images whose rows were in the cache", stats.hits),
            ("misses", "Images whose rows were not", stats.misses),
            ("evictions", "Images evicted to make room", stats.evictions),
            ("refused", "Images larger than the whole cache", stats.refused),
        ):
            yield CounterMetricFamily(f"tessera_embedding_cache_{name}", text, value=value)
        for name, text, value in (
            ("entries", "Images held", stats.entries),
            ("bytes", "Bytes held", stats.nbytes),
            ("capacity_bytes", "Bytes that may be held", stats.capacity),
        ):
            yield GaugeMetricFamily(f"tessera_embedding_cache_{name}", text, value=value)


class _SlabCollector(Collector):
    def __init__(self, read: Callable[[], SlabStats]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        stats = self._read()
        yield GaugeMetricFamily(
            "tessera_slab_capacity_bytes", "Bytes of the slab", value=stats.capacity_bytes
        )
        yield GaugeMetricFamily("tessera_slab_used_bytes", "Bytes lent or reserved", value=stats.used_bytes)
        yield GaugeMetricFamily("tessera_slab_leases", "Leases outstanding", value=stats.leased)
        yield CounterMetricFamily("tessera_slab_expired", "Leases reclaimed unread", value=stats.expired)
        yield CounterMetricFamily("tessera_slab_waits", "Requests that waited for a slot", value=stats.waits)
