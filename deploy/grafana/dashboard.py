"""The Grafana dashboard, from one list of panels: ``python deploy/grafana/dashboard.py`` writes tessera.json.

Needs ``grafana-foundation-sdk``, which the dev extra brings. Metric names: docs/metrics.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef

OUT = Path(__file__).with_name("tessera.json")
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """``unit`` is Grafana's name of one; three panels stand in a row."""

    title: str
    unit: str
    queries: tuple[Query, ...]


# As in deploy/prometheus/rules.yaml: probes and open pages ask far more often than clients.
EMBEDDING = (
    'route=~"/v1/embeddings|/v2/embed|/v1/multimodalembeddings|/embed|/embed_all|/pooling|'
    '(/v[12])?/rerank|/v1/ranking|/v1/retrieval/.+|(/v1)?/score|dynamo"'
)


def rate(metric: str, by: str, *, where: str = "") -> Query:
    selector = f"{metric}{{{where}}}" if where else metric
    return Query(
        f"sum by ({by}) (rate({selector}[$__rate_interval]))",
        " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(",")),
    )


def quantiles(metric: str, by: str = "", *, legend: str = "") -> tuple[Query, ...]:
    """p50 and p99 of a histogram; ``by`` is a label to keep."""
    labels = f"le, {by}" if by else "le"
    name = legend or (f"{{{{{by}}}}}" if by else "")
    return tuple(
        Query(
            f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket[$__rate_interval])))",
            f"{name} p{round(q * 100)}".strip(),
        )
        for q in (0.5, 0.99)
    )


ROWS: dict[str, tuple[Panel, ...]] = {
    "Traffic": (
        Panel(
            "Requests",
            "reqps",
            (rate("tessera_requests_total", "route, status", where=EMBEDDING),),
        ),
        Panel("Time to answer", "s", quantiles("tessera_request_seconds", "route")),
        Panel("Errors", "reqps", (rate("tessera_errors_total", "code"),)),
        Panel("Inputs", "ops", (rate("tessera_inputs_total", "kind, model"),)),
        Panel("Tokens", "ops", (rate("tessera_tokens_total", "kind"),)),
        Panel(
            "Pairs and output rows",
            "ops",
            (
                Query("sum(rate(tessera_pairs_total[$__rate_interval]))", "pairs"),
                Query("sum(rate(tessera_output_rows_total[$__rate_interval]))", "rows"),
            ),
        ),
        Panel(
            "Requests in flight",
            "short",
            (Query("sum by (instance) (tessera_requests_in_flight)", "{{instance}}"),),
        ),
    ),
    "Where the time goes": (
        Panel(
            "Frontend",
            "s",
            quantiles("tessera_media_seconds", legend="images")
            + quantiles("tessera_prompt_seconds", legend="tokens")
            + quantiles("tessera_dispatch_seconds", legend="workers")
            + quantiles("tessera_format_seconds", legend="answer"),
        ),
        Panel("Waiting for an engine", "s", quantiles("tessera_queue_seconds", "stage")),
        Panel("Decode and preprocess an image", "s", quantiles("tessera_preprocess_seconds")),
        Panel("Vision batch", "s", quantiles("tessera_encode_seconds")),
        Panel("Text batch", "s", quantiles("tessera_embed_seconds")),
        Panel("Hand-off of an image's rows", "s", quantiles("tessera_transfer_seconds", "route")),
    ),
    "Engines": (
        Panel("Tokens in a batch", "short", quantiles("tessera_batch_tokens")),
        Panel("Units of images in a batch", "short", quantiles("tessera_batch_units")),
        Panel("Inputs or images in a batch", "short", quantiles("tessera_batch_entries", "stage")),
        Panel(
            "Busy",
            "percentunit",
            (
                Query(
                    "sum by (instance) (rate(tessera_embed_seconds_sum[$__rate_interval]))",
                    "text {{instance}}",
                ),
                Query(
                    "sum by (instance) (rate(tessera_encode_seconds_sum[$__rate_interval]))",
                    "vision {{instance}}",
                ),
            ),
        ),
        Panel(
            "Queue fill",
            "percentunit",
            (Query("tessera_queued / tessera_queue_limit", "{{stage}} {{instance}}"),),
        ),
        Panel(
            "In flight",
            "short",
            (
                Query("tessera_tokens_in_flight", "tokens {{instance}}"),
                Query("tessera_units_in_flight", "units {{instance}}"),
            ),
        ),
    ),
    "Vision rows": (
        Panel(
            "Cache hit ratio",
            "percentunit",
            (
                Query(
                    "sum by (instance) (rate(tessera_embedding_cache_hits_total[$__rate_interval]))"
                    " / clamp_min("
                    "sum by (instance) (rate(tessera_embedding_cache_hits_total[$__rate_interval]) + "
                    "rate(tessera_embedding_cache_misses_total[$__rate_interval])), 1e-9)",
                    "{{instance}}",
                ),
            ),
        ),
        Panel(
            "Cache",
            "bytes",
            (
                Query("tessera_embedding_cache_bytes", "held {{instance}}"),
                Query("tessera_embedding_cache_capacity_bytes", "may hold {{instance}}"),
            ),
        ),
        Panel("Cache evictions", "ops", (rate("tessera_embedding_cache_evictions_total", "instance"),)),
        Panel("Hand-offs", "ops", (rate("tessera_transfers_total", "route, outcome"),)),
        Panel("Rows read", "Bps", (rate("tessera_transfer_bytes_total", "route"),)),
        Panel(
            "Slab",
            "bytes",
            (
                Query("tessera_slab_used_bytes", "lent {{instance}}"),
                Query("tessera_slab_capacity_bytes", "all {{instance}}"),
            ),
        ),
    ),
    "Trouble": (
        Panel(
            "Workers that can serve",
            "short",
            (Query("max by (component, model) (tessera_workers)", "{{component}} {{model}}"),),
        ),
        Panel(
            "Retries",
            "ops",
            (
                Query("sum(rate(tessera_retries_total[$__rate_interval]))", "inputs"),
                Query("sum(rate(tessera_encode_retries_total[$__rate_interval]))", "images"),
            ),
        ),
        Panel(
            "Items that failed",
            "ops",
            (rate("tessera_items_total", "stage, outcome", where='outcome!="ok"'),),
        ),
        Panel(
            "Leases",
            "short",
            (
                Query("tessera_slab_leases", "out {{instance}}"),
                Query("tessera_slab_waiting", "waiting {{instance}}"),
                Query("increase(tessera_slab_expired_total[$__rate_interval])", "expired {{instance}}"),
            ),
        ),
        Panel(
            "Dynamo calls",
            "reqps",
            (rate("dynamo_component_requests_total", "dynamo_component, dynamo_endpoint"),),
        ),
        Panel(
            "Dynamo calls in flight",
            "short",
            (
                Query(
                    "sum by (dynamo_component) (dynamo_component_inflight_requests)", "{{dynamo_component}}"
                ),
            ),
        ),
    ),
}


def build() -> str:
    """The dashboard as JSON."""
    made = (
        dashboard.Dashboard("Tessera")
        .uid("tessera")
        .tags(["tessera", "dynamo"])
        .refresh("10s")
        .time("now-30m", "now")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    )
    for title, panels in ROWS.items():
        made = made.with_row(dashboard.Row(title))
        for panel in panels:
            made = made.with_panel(_panel(panel))
    return str(JSONEncoder(sort_keys=True, indent=2).encode(made.build())) + "\n"


def _panel(panel: Panel) -> timeseries.Panel:
    made = timeseries.Panel().title(panel.title).unit(panel.unit).min(0).span(8).height(8).datasource(SOURCE)
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        made = made.with_target(
            prometheus.Dataquery()
            .expr(query.expr)
            .legend_format(query.legend)
            .ref_id(letter)
            .datasource(SOURCE)
        )
    return made


if __name__ == "__main__":
    OUT.write_text(build(), encoding="utf-8")
