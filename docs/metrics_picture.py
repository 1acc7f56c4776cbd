"""Draws the main figures of the Grafana dashboard, as a real Prometheus has them.

Titles, expressions and legends are the dashboard's own (deploy/grafana/tessera.json). ``docs/pictures.py
metrics`` brings the service and the traffic.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter

matplotlib.use("Agg")

DASHBOARD = Path(__file__).parents[1] / "deploy" / "grafana" / "tessera.json"
PANELS = (
    "Requests",
    "Time to answer",
    "Inputs",
    "Waiting for an engine",
    "Tokens in a batch",
    "Units of images in a batch",
    "Cache hit ratio",
    "Hand-offs",
    "Hand-off of an image's rows",
)
_UNITS = {"reqps": "requests a second", "ops": "a second", "s": "seconds", "percentunit": "", "short": ""}
_POLLS = ("/metrics", "/health", "/status", "/live")
_STEP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Span:
    """What to draw, in Unix seconds, and over how many seconds each rate is taken."""

    start: float
    end: float
    rate_seconds: int = 15


def draw(
    prometheus: str, span: Span, target: Path, *, names: Mapping[str, str], title: str
) -> dict[str, int]:
    """Writes a PNG; how many lines each panel has. ``names`` replace instances (``host:port``) in legends."""
    board = json.loads(DASHBOARD.read_text())
    panels = {panel["title"]: panel for panel in board["panels"]}
    figure = Figure(figsize=(12, 8.4), layout="constrained")
    figure.suptitle(title, fontsize=11)
    drawn = {}
    for name, axes in zip(PANELS, figure.subplots(3, 3).flat, strict=True):
        drawn[name] = _panel(axes, panels[name], prometheus, span, names)
    figure.savefig(target, dpi=100)
    return drawn


def _panel(
    axes: Axes, panel: Mapping[str, Any], prometheus: str, span: Span, names: Mapping[str, str]
) -> int:
    lines = 0
    for query in panel["targets"]:
        for labels, points in _series(prometheus, query["expr"], span):
            # What polls is left out.
            if labels.get("route") in _POLLS:
                continue
            if any(math.isfinite(value) for _, value in points):
                legend = _legend(query.get("legendFormat", ""), labels, names)
                axes.plot([at - span.start for at, _ in points], [value for _, value in points], label=legend)
                lines += 1
    unit = panel["fieldConfig"]["defaults"]["unit"]
    axes.set_title(panel["title"], fontsize=10, loc="left", fontweight="bold")
    axes.set_ylabel(_UNITS[unit], fontsize=8)
    axes.set_xlim(0, span.end - span.start)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    if unit == "s":
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    if unit == "percentunit":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(0, 1.05)
    if lines:
        axes.legend(fontsize=7, framealpha=0.6)
    return lines


def _series(
    prometheus: str, expr: str, span: Span
) -> Iterator[tuple[dict[str, str], list[tuple[float, float]]]]:
    """The labels of each series and its values over time."""
    answer = httpx2.get(
        f"{prometheus}/api/v1/query_range",
        params={
            "query": expr.replace("$__rate_interval", f"{span.rate_seconds}s"),
            "start": span.start,
            "end": span.end,
            "step": _STEP_SECONDS,
        },
        timeout=30,
    )
    answer.raise_for_status()
    for row in answer.json()["data"]["result"]:
        yield row["metric"], [(float(at), float(value)) for at, value in row["values"]]


def _legend(template: str, labels: Mapping[str, str], names: Mapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        text = labels.get(found[1], "")
        return names.get(text, text)

    return re.sub(r"\{\{(\w+)\}\}", value, template)
