"""What a worker counts; one registry for each process, rendered on the runtime's own ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

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

from tessera import __version__, tracing, wire
from tessera.batching import Batcher, Events
from tessera.cache import EmbeddingCache
from tessera.errors import DeadlineExceeded, EngineDead, EngineFailed, Overloaded, Unavailable
from tessera.loop_metrics import LoopFailures
from tessera.transport.slab.slab import SlabStats

P = TypeVar("P")

# From a copy within one GPU to a queue at its deadline.
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
_TILES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# A unit is a tile of some families and a patch of others, of which a page has thousands.
_UNITS = (*_TILES, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
# Outcomes that are made at the start: a rate misses the first count of a series that is new.
_OUTCOMES = ("ok", Overloaded.code, DeadlineExceeded.code, EngineFailed.code)
_IN_FLIGHT = {
    "text": (("tessera_tokens_in_flight", "Tokens of requests that are being answered"),),
    "vision": (
        ("tessera_units_in_flight", "Units of images that are being encoded"),
        ("tessera_tiles_in_flight", "The same as tessera_units_in_flight, whose old name it is"),
    ),
}
_ROLE = {"text": "embed", "vision": "encode"}


class WorkerMetrics:
    """Counters and histograms of one worker. Updated from its event loop."""

    def __init__(self) -> None:
        # They would add a second series to each counter, with the time at which it began.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        registry = self.registry
        self.items = self._counter("tessera_items", "Inputs or images answered", "stage", "outcome")
        self._entries = self._sizes("tessera_batch_entries", "Entries in a batch", _COUNTS, "stage")
        self._queue = self._seconds(
            "tessera_queue_seconds", "Time that an image or a request's slowest input waited", "stage"
        )
        self.preprocess_seconds = self._seconds(
            "tessera_preprocess_seconds",
            "Time to decode an image and make its pixels, with its wait for a thread",
        )
        self.transfer_seconds = self._seconds(
            "tessera_transfer_seconds", "Time to read an image's rows from an encode worker", "route"
        )
        self.transfers = self._counter("tessera_transfers", "Vision hand-offs read", "route", "outcome")
        self.transfer_bytes = self._counter("tessera_transfer_bytes", "Vision rows read", "route")
        self.encode_calls = self._counter("tessera_encode_calls", "Calls to encode workers", "outcome")
        self.decoder_losses = self._counter(
            "tessera_decoder_losses", "Image decoders that were replaced", "why"
        )
        self._cancelled = self._counter(
            "tessera_dropped",
            "Inputs or images whose caller went away before the engine began them",
            "stage",
        )
        self._precision = Gauge(
            "tessera_precision",
            "What a stage computes in",
            ["stage", "dtype", "rounding"],
            registry=registry,
        )
        self._batchers: list[Batcher[Any, Any]] = []
        self._cache: EmbeddingCache | None = None
        self._slab: Callable[[], SlabStats] | None = None
        self.encode_retries = self._counter(
            "tessera_encode_retries", "Images asked for again, elsewhere or once more"
        )
        self._queued = Gauge(
            "tessera_queued", "Tokens or units waiting for the engine", ["stage"], registry=registry
        )
        self._queue_limit = Gauge(
            "tessera_queue_limit", "Tokens or units that may wait", ["stage"], registry=registry
        )
        registry.register(LoopFailures())
        for outcome in ("ok", Unavailable.code):
            self.encode_calls.labels(outcome)

    def set_info(self, role: str, model: str) -> None:
        """Add ``tessera_info``; called once."""
        info = Gauge(
            "tessera_info", "What this process is", ["role", "model", "version"], registry=self.registry
        )
        info.labels(role, model, __version__).set(1)

    def set_precision(self, stage: str, dtype: str, rounding: str) -> None:
        """Say what a stage computes in; ``rounding`` is what it rounds beyond the type, empty for nothing."""
        self._precision.labels(stage, dtype, rounding).set(1)

    def events(
        self,
        stage: str,
        *,
        died: Callable[[EngineDead], None],
        attributes: Callable[[Sequence[P]], tracing.Attributes],
    ) -> Events[P]:
        """Return the callbacks of the batcher of stage ``text`` or ``vision``; called once for each."""
        if stage == "text":
            seconds = self._seconds("tessera_embed_seconds", "Time of a text batch in its engine")
            sizes = [self._sizes("tessera_batch_tokens", "Tokens in a text batch", _TOKENS)]
        else:
            seconds = self._seconds("tessera_encode_seconds", "Time of a vision batch in its engine")
            old = "The same as tessera_batch_units, whose old name it is"
            sizes = [
                self._sizes("tessera_batch_units", "Units in a vision batch", _UNITS),
                self._sizes("tessera_batch_tiles", old, _TILES),
            ]
        for outcome in _OUTCOMES:
            self.items.labels(_ROLE[stage], outcome)
        return Events(
            entries=self._entries.labels(stage).observe,
            sizes=[size.observe for size in sizes],
            seconds=seconds.observe,
            cancelled=self._cancelled.labels(stage).inc,
            died=died,
            attributes=attributes,
        )

    def queued(self, stage: str) -> Callable[[float], None]:
        """Return the observer of seconds in the queue of stage ``text`` or ``vision``."""
        return self._queue.labels(stage).observe

    def watch_batcher(self, batcher: Batcher[Any, Any], in_flight: Callable[[], float]) -> None:
        """Show the queue of the batcher named after its stage, and what its stage has ``in_flight``."""
        self._batchers.append(batcher)
        self._queued.labels(batcher.name).set_function(lambda: batcher.queued)
        self._queue_limit.labels(batcher.name).set_function(lambda: batcher.limit)
        for name, text in _IN_FLIGHT[batcher.name]:
            self._watch(name, text, in_flight)

    def watch_cache(self, cache: EmbeddingCache) -> None:
        self._cache = cache
        self.registry.register(_StatsCollector(lambda: cache, _CACHE))

    def watch_registrations(self, read: Callable[[], int]) -> None:
        self._watch("tessera_nixl_registrations", "Regions of memory registered with NIXL", read)

    def watch_peers(self, read: Callable[[], int]) -> None:
        self._watch("tessera_slab_peers", "Encode workers whose slabs this worker can reach", read)

    def watch_slab(self, read: Callable[[], SlabStats]) -> None:
        self._slab = read
        self.registry.register(_StatsCollector(read, _SLAB))

    def state(self) -> wire.WorkerState:
        """What the frontend's ``/status`` says of this worker."""
        cache, slab = self._cache, self._slab and self._slab()
        return wire.WorkerState(
            queued={batcher.name: batcher.queued for batcher in self._batchers},
            cache=None
            if cache is None
            else wire.CacheState(
                hits=cache.hits,
                misses=cache.misses,
                entries=len(cache),
                nbytes=cache.used,
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

    def _watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        Gauge(name, text, registry=self.registry).set_function(read)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _seconds(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=_SECONDS, registry=self.registry)

    def _sizes(self, name: str, text: str, buckets: tuple[int, ...], *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)


_CACHE = {
    "hits": (CounterMetricFamily, "tessera_embedding_cache_hits", "Images whose rows were in the cache"),
    "misses": (CounterMetricFamily, "tessera_embedding_cache_misses", "Images whose rows were not"),
    "evictions": (CounterMetricFamily, "tessera_embedding_cache_evictions", "Images evicted to make room"),
    "refused": (CounterMetricFamily, "tessera_embedding_cache_refused", "Images larger than the whole cache"),
    "entries": (GaugeMetricFamily, "tessera_embedding_cache_entries", "Images held"),
    "used": (GaugeMetricFamily, "tessera_embedding_cache_bytes", "Bytes held"),
    "capacity": (GaugeMetricFamily, "tessera_embedding_cache_capacity_bytes", "Bytes that may be held"),
}
_SLAB = {
    "capacity_bytes": (GaugeMetricFamily, "tessera_slab_capacity_bytes", "Bytes of the slab"),
    "used_bytes": (GaugeMetricFamily, "tessera_slab_used_bytes", "Bytes lent or reserved"),
    "leased": (GaugeMetricFamily, "tessera_slab_leases", "Leases outstanding"),
    "waiting": (GaugeMetricFamily, "tessera_slab_waiting", "Requests that wait for a slot"),
    "published": (CounterMetricFamily, "tessera_slab_published", "Leases given"),
    "expired": (CounterMetricFamily, "tessera_slab_expired", "Leases reclaimed unread"),
    "waits": (CounterMetricFamily, "tessera_slab_waits", "Requests that waited for a slot"),
}


class _StatsCollector(Collector):
    """Gives the fields of what ``read`` returns, each by its family, name and text in ``fields``."""

    def __init__(
        self,
        read: Callable[[], EmbeddingCache | SlabStats],
        fields: Mapping[str, tuple[type[CounterMetricFamily | GaugeMetricFamily], str, str]],
    ) -> None:
        self._read = read
        self._fields = fields

    def collect(self) -> Iterable[Metric]:
        stats = self._read()
        for field, (family, name, text) in self._fields.items():
            yield family(name, text, value=getattr(stats, field))
