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
from tessera.frontend.admission.room import Admission, Room
from tessera.frontend.group import Seat
from tessera.loop_metrics import LoopFailures
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

    def watch(self, name: str, text: str, ask: Ask, **labels: str) -> Callable[[], None]:
        """What ends it again."""
        _, _, series = self._asked.setdefault(name, (text, tuple(labels), []))
        one = tuple(labels.values()), ask
        series.append(one)
        return partial(series.remove, one)

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
        self.requests = self._counter(
            "tessera_requests",
            "HTTP requests answered; without a model those that were refused before it was known",
            *("route", "status", "model"),
        )
        self.latency = self._seconds(
            "tessera_request_seconds", "Time to answer a request", "route", "model", buckets=_SECONDS
        )
        self.errors = self._counter(
            "tessera_errors", "HTTP requests answered with an error", "route", "code", "model"
        )
        self.input_errors = self._counter(
            "tessera_input_errors", "Inputs that failed alone, in answers to the rest", "code", "model"
        )
        self.media_seconds = self._seconds(
            "tessera_media_seconds", "Time to obtain a request's images", "model", buckets=_SECONDS
        )
        self.prompt_seconds = self._seconds(
            "tessera_prompt_seconds", "Time to turn a request's inputs into tokens", "model"
        )
        self.dispatch_seconds = self._seconds(
            *("tessera_dispatch_seconds", "Time that a request's inputs were with workers", "model"),
            buckets=_SECONDS,
        )
        self.format_seconds = self._seconds("tessera_format_seconds", "Time to write an answer", "model")
        self.inputs = self._counter("tessera_inputs", "Inputs accepted", "kind", "model")
        self.tokens = self._counter("tessera_tokens", "Tokens embedded", "kind", "model")
        self.pairs = self._counter(
            "tessera_pairs", "Documents that were scored, each with its query", "model"
        )
        self.output_rows = self._counter(
            "tessera_output_rows", "Rows of the models that workers sent here", "output", "model"
        )
        self.retries = self._counter("tessera_retries", "Items sent to a second worker", "model")
        self.refused = self._counter(
            "tessera_refused", "Requests refused before their bodies were read", "why"
        )
        self.result_cache = self._counter(
            "tessera_result_cache", "Inputs looked up in the result cache", "outcome", "model"
        )
        registry.register(LoopFailures())
        self.disconnects = self._counter("tessera_disconnects", "Clients that went away")
        self.retries_denied = self._counter(
            "tessera_retries_denied", "Retries that the budget did not allow", "model"
        )

    def of(self, model: str) -> ModelMetrics:
        """What is counted of one model."""
        return ModelMetrics(self, model)

    def watch(self, admission: Admission, lent_bytes: Ask) -> None:
        """Show what is in flight, and what is lent, from now on."""
        watch = self._gauges.watch
        watch(
            "tessera_lent_bytes",
            "Bytes lent to workers: clients' own vision rows, long replies in use",
            lent_bytes,
        )
        watch("tessera_requests_in_flight", "Requests being answered", lambda: admission.requests.used)
        watch(
            "tessera_admitted_response_bytes",
            "Bytes that the answers to the requests being answered may take",
            lambda: admission.answers.used,
        )
        watch(
            "tessera_body_bytes",
            "Bytes of bodies, as announced, and of fetched images, until they are answered",
            lambda: admission.bodies.used,
        )
        admission.bodies.refused = self.refused.labels("bodies").inc

    def render(self) -> bytes:
        return generate_latest(self._all)

    def total(self, name: str, label: str, **labels: str) -> dict[str, int]:
        """A counter's values by a label, of all frontends of the group; ``name`` without ``_total``.

        ``labels`` are those that count.
        """
        found: dict[str, int] = {}
        for family in self._all.collect():
            for sample in family.samples:
                if sample.name == f"{name}_total" and labels.items() <= sample.labels.items():
                    key = sample.labels[label]
                    found[key] = found.get(key, 0) + int(sample.value)
        return found

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _seconds(
        self, name: str, text: str, *labels: str, buckets: tuple[float, ...] = _STEP_SECONDS
    ) -> Histogram:
        return Histogram(name, text, labels, buckets=buckets, registry=self.registry)


class ModelMetrics:
    """The series of one model. They are bound once: finding one takes longer than counting in it.

    Gauges are shown until ``forget``; what was counted stays.
    """

    def __init__(self, all_models: FrontendMetrics, model: str) -> None:
        self.model = model
        self.input_errors: Callable[[str], Counter] = lambda code: all_models.input_errors.labels(code, model)
        """The counter of inputs that failed with a ``code``."""
        self.rows_of: Callable[[str], Counter] = lambda output: all_models.output_rows.labels(output, model)
        """The counter of an ``output``'s rows, which exists from then on."""
        self._gauges = all_models._gauges
        self._watched: list[Callable[[], None]] = []
        self.media_seconds = all_models.media_seconds.labels(model)
        self.prompt_seconds = all_models.prompt_seconds.labels(model)
        self.dispatch_seconds = all_models.dispatch_seconds.labels(model)
        self.format_seconds = all_models.format_seconds.labels(model)
        self.inputs = {kind: all_models.inputs.labels(kind, model) for kind in ("text", "image")}
        self.tokens = {kind: all_models.tokens.labels(kind, model) for kind in ("text", "image", "cached")}
        self.pairs = all_models.pairs.labels(model)
        self.retries = all_models.retries.labels(model)
        self.retries_denied = all_models.retries_denied.labels(model)
        self.result_cache = {
            outcome: all_models.result_cache.labels(outcome, model) for outcome in ("hit", "miss", "joined")
        }
        # These exist from the start, because a rate misses a series' first count.
        all_models.requests.labels(_ROUTE, "200", model)
        for error in (TesseraError, Overloaded, Unavailable, DeadlineExceeded):
            all_models.errors.labels(_ROUTE, error.code, model)

    def _watch(self, name: str, text: str, ask: Ask, **labels: str) -> None:
        self._watched.append(self._gauges.watch(name, text, ask, **labels, model=self.model))

    def watch_room(self, room: Room) -> None:
        """Show that this process serves the model, and what is in the model's room."""
        self._watch("tessera_info", "What this process is", lambda: 1, role="frontend", version=__version__)
        self._watch(
            "tessera_admitted_tokens", "Tokens of the requests being answered", lambda: room.tokens.used
        )
        self._watch(
            "tessera_admitted_units",
            "Units of the vision stage (tiles, or patches) of the requests being answered",
            lambda: room.units.used,
        )
        self._watch(
            "tessera_admitted_tiles", "The old name of tessera_admitted_units", lambda: room.units.used
        )

    def watch_workers(self, component: str, peers: Peers, *, expected: Ask) -> None:
        watch = self._watch
        watch("tessera_workers", "Workers that can serve", lambda: len(peers.ready), component=component)
        watch("tessera_workers_expected", "Workers that were started", expected, component=component)

    def watch_result_cache(self, nbytes: Ask) -> None:
        self._watch("tessera_result_cache_bytes", "Bytes that the result cache holds", nbytes)

    def forget(self) -> None:
        """Show no gauges of the model any more."""
        for end in self._watched:
            end()
        self._watched.clear()
