"""What the frontend counts; rendered at ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from tessera import __version__
from tessera.errors import DeadlineExceeded, Overloaded, TesseraError, Unavailable
from tessera.frontend.http.admission import Admission
from tessera.rpc import Peers

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# What the frontend itself does to a request, from one short text to two thousand inputs.
_STEP_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_ROUTE = "/v1/embeddings"


class FrontendMetrics:
    """Counters and histograms of one frontend. Updated from its event loop."""

    def __init__(self) -> None:
        # A second series for each counter, with the time when it began.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        registry = self.registry
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
        self.retries = Counter("tessera_retries", "Items sent to a second worker", registry=registry)
        self.refused = Counter(
            "tessera_refused", "Requests refused before their bodies were read", ["why"], registry=registry
        )
        self.result_cache = Counter(
            "tessera_result_cache", "Inputs looked up in the result cache", ["outcome"], registry=registry
        )
        self._result_cache_bytes = Gauge(
            "tessera_result_cache_bytes", "Bytes that the result cache holds", registry=registry
        )
        self._lent_bytes = Gauge(
            "tessera_lent_bytes", "Bytes of clients' own vision rows that workers may read", registry=registry
        )
        self.disconnects = Counter("tessera_disconnects", "Clients that went away", registry=registry)
        self.in_flight = Gauge("tessera_requests_in_flight", "Requests being answered", registry=registry)
        self._admitted_tokens = Gauge(
            "tessera_admitted_tokens", "Tokens of the requests being answered", registry=registry
        )
        self._admitted_units = Gauge(
            "tessera_admitted_units",
            "Units of the vision stage (tiles, or patches) of the requests being answered",
            registry=registry,
        )
        self._admitted_tiles = Gauge(
            "tessera_admitted_tiles", "The old name of tessera_admitted_units", registry=registry
        )
        self._admitted_response_bytes = Gauge(
            "tessera_admitted_response_bytes",
            "Bytes that the answers to the requests being answered may take",
            registry=registry,
        )
        self.retries_denied = Counter(
            "tessera_retries_denied", "Retries that the budget did not allow", registry=registry
        )
        self._workers = Gauge("tessera_workers", "Workers that can serve", ["component"], registry=registry)
        self._workers_expected = Gauge(
            "tessera_workers_expected", "Workers that were started", ["component"], registry=registry
        )
        # These exist from the start, because a rate misses a series' first count.
        self.requests.labels(_ROUTE, "200")
        for error in (TesseraError, Overloaded, Unavailable, DeadlineExceeded):
            self.errors.labels(_ROUTE, error.code)

    def set_info(self, model: str) -> None:
        """Say once what this process is."""
        info = Gauge(
            "tessera_info", "What this process is", ["role", "model", "version"], registry=self.registry
        )
        info.labels("frontend", model, __version__).set(1)

    def watch_lent_rows(self, nbytes: Callable[[], int]) -> None:
        self._lent_bytes.set_function(nbytes)

    def watch_admission(self, admission: Admission) -> None:
        self.in_flight.set_function(lambda: admission.requests)
        self._admitted_tokens.set_function(lambda: admission.tokens)
        self._admitted_units.set_function(lambda: admission.units)
        self._admitted_tiles.set_function(lambda: admission.units)
        self._admitted_response_bytes.set_function(lambda: admission.response_bytes)

    def watch_workers(self, component: str, peers: Peers, *, expected: int) -> None:
        self._workers.labels(component).set_function(lambda: len(peers.ready))
        self._workers_expected.labels(component).set(expected)

    def watch_result_cache(self, nbytes: Callable[[], int]) -> None:
        self._result_cache_bytes.set_function(nbytes)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _step(self, name: str, text: str, buckets: tuple[float, ...] = _STEP_SECONDS) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)
