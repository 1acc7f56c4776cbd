"""What the frontend counts; rendered at ``/metrics``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
    values,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from tessera import __version__
from tessera.errors import DeadlineExceeded, Overloaded, TesseraError, Unavailable
from tessera.frontend.group import Seat
from tessera.frontend.http.admission import Admission
from tessera.rpc import Peers

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# What the frontend itself does to a request, from one short text to two thousand inputs.
_STEP_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_ROUTE = "/v1/embeddings"

Ask = Callable[[], float]


def _keep_values(folder: str, index: int) -> None:
    """Keep what is counted from now on in files of a folder, as the library does for several processes.

    A frontend that is started again in the same seat goes on with its files.
    """
    # Should somebody have removed it, counting begins anew.
    os.makedirs(folder, mode=0o700, exist_ok=True)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    values.ValueClass = values.MultiProcessValue(partial(int, index))  # type: ignore[no-untyped-call]


class _Gauges(Collector):
    """What is asked for when it is shown: of now, not of what has been counted."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[str, tuple[str, ...], list[tuple[tuple[str, ...], Ask]]]] = {}

    def watch(self, name: str, text: str, ask: Ask, **labels: str) -> None:
        _, _, series = self._asked.setdefault(name, (text, tuple(labels), []))
        series.append((tuple(labels.values()), ask))

    def collect(self) -> Iterator[Metric]:
        for name, (text, labels, series) in self._asked.items():
            family = GaugeMetricFamily(name, text, labels=labels)
            for named, ask in series:
                family.add_metric(named, ask())
            yield family


class FrontendMetrics:
    """Counters and histograms of one frontend, or with a ``seat`` of its group; owned by one event loop.

    Those of frontends that have ended stay counted. Gauges are of what is there now.
    """

    def __init__(self, seat: Seat | None = None) -> None:
        # A second series for each counter, with the time when it began.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        if seat is not None:
            _keep_values(seat.metrics, seat.index)
        self.registry = CollectorRegistry()
        registry = self.registry
        self._gauges = _Gauges()
        registry.register(self._gauges)
        self._all = registry
        if seat is not None:
            self._all = CollectorRegistry()
            MultiProcessCollector(self._all, seat.metrics)  # type: ignore[no-untyped-call]
            self._all.register(self._gauges)
        self.requests = Counter(
            "tessera_requests", "HTTP requests answered", ["route", "status"], registry=registry
        )
        self.latency = Histogram(
            "tessera_request_seconds",
            "Time to answer a request",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.errors = Counter(
            "tessera_errors", "HTTP requests answered with an error", ["route", "code"], registry=registry
        )
        self.input_errors = Counter(
            "tessera_input_errors",
            "Inputs that failed alone, in answers to the rest",
            ["code"],
            registry=registry,
        )
        self.media_seconds = self._step(
            "tessera_media_seconds", "Time to obtain a request's images", _SECONDS
        )
        self.prompt_seconds = self._step(
            "tessera_prompt_seconds", "Time to turn a request's inputs into tokens"
        )
        self.dispatch_seconds = self._step(
            "tessera_dispatch_seconds", "Time that a request's inputs were with workers", _SECONDS
        )
        self.format_seconds = self._step("tessera_format_seconds", "Time to write an answer")
        self.inputs = Counter("tessera_inputs", "Inputs accepted", ["kind"], registry=registry)
        self.tokens = Counter("tessera_tokens", "Tokens embedded", ["kind"], registry=registry)
        self.pairs = Counter(
            "tessera_pairs", "Documents that were scored, each with its query", registry=registry
        )
        self.output_rows = Counter(
            "tessera_output_rows", "Rows of the models that workers sent here", registry=registry
        )
        self.retries = Counter("tessera_retries", "Items sent to a second worker", registry=registry)
        self.refused = Counter(
            "tessera_refused", "Requests refused before their bodies were read", ["why"], registry=registry
        )
        self.result_cache = Counter(
            "tessera_result_cache", "Inputs looked up in the result cache", ["outcome"], registry=registry
        )
        self.disconnects = Counter("tessera_disconnects", "Clients that went away", registry=registry)
        self.retries_denied = Counter(
            "tessera_retries_denied", "Retries that the budget did not allow", registry=registry
        )
        # These exist from the start, because a rate misses a series' first count.
        self.requests.labels(_ROUTE, "200")
        for error in (TesseraError, Overloaded, Unavailable, DeadlineExceeded):
            self.errors.labels(_ROUTE, error.code)

    def set_info(self, model: str) -> None:
        """Say once what this process is."""
        self._gauges.watch(
            "tessera_info",
            "What this process is",
            lambda: 1,
            role="frontend",
            model=model,
            version=__version__,
        )

    def watch_lent_rows(self, nbytes: Ask) -> None:
        self._gauges.watch(
            "tessera_lent_bytes", "Bytes of clients' own vision rows that workers may read", nbytes
        )

    def watch_admission(self, admission: Admission) -> None:
        watch = self._gauges.watch
        watch("tessera_requests_in_flight", "Requests being answered", lambda: admission.requests)
        watch("tessera_admitted_tokens", "Tokens of the requests being answered", lambda: admission.tokens)
        watch(
            "tessera_admitted_units",
            "Units of the vision stage (tiles, or patches) of the requests being answered",
            lambda: admission.units,
        )
        watch("tessera_admitted_tiles", "The old name of tessera_admitted_units", lambda: admission.units)
        watch(
            "tessera_admitted_response_bytes",
            "Bytes that the answers to the requests being answered may take",
            lambda: admission.response_bytes,
        )

    def watch_workers(self, component: str, peers: Peers, *, expected: int) -> None:
        watch = self._gauges.watch
        watch("tessera_workers", "Workers that can serve", lambda: len(peers.ready), component=component)
        watch("tessera_workers_expected", "Workers that were started", lambda: expected, component=component)

    def watch_result_cache(self, nbytes: Ask) -> None:
        self._gauges.watch("tessera_result_cache_bytes", "Bytes that the result cache holds", nbytes)

    def render(self) -> bytes:
        return generate_latest(self._all)

    def total(self, name: str, label: str) -> dict[str, int]:
        """A counter's values by a label, of all frontends of the group; ``name`` without ``_total``."""
        found: dict[str, int] = {}
        for family in self._all.collect():
            for sample in family.samples:
                if sample.name == f"{name}_total":
                    key = sample.labels[label]
                    found[key] = found.get(key, 0) + int(sample.value)
        return found

    def _step(self, name: str, text: str, buckets: tuple[float, ...] = _STEP_SECONDS) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)
