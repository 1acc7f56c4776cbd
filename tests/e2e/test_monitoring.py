"""A real Prometheus scrapes a running ``e_p``: every panel, every rule and every listed metric has data."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from PIL import Image

from tests.e2e.inputs import image_input, picture
from tests.e2e.monitoring import Prometheus, prometheus
from tests.e2e.service import MODEL, ROOT, Service, launch
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.service,
    pytest.mark.operates,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus (Debian package) is missing"),
]

# What only faults, other requests or other settings bring about.
RARE = {
    "tessera_decoder_losses_total",
    "tessera_input_errors_total",
    "tessera_kserve_calls_total",
    "tessera_kserve_nanoseconds_total",
    "tessera_loop_failures_total",
    "tessera_refused_total",
    "tessera_result_cache_total",
}


@pytest.fixture(scope="module")
def service(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    log = tmp_path_factory.mktemp("monitored") / "log"
    with launch("e_p.sh", checkpoint, log, workers=2) as running:
        yield running


class Traffic:
    """Text, new and known images, and requests that fail, until it is stopped."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        known = image_input(picture(1))
        with httpx.Client(base_url=self._url, timeout=60) as client:
            turn = 0
            while not self._stop.is_set():
                turn += 1
                value = ["some text", known, image_input(picture(1000 + turn))]
                assert client.post("/v1/embeddings", json={"model": MODEL, "input": value}).status_code == 200
                assert client.post("/v1/embeddings", json={"model": MODEL, "input": 5}).status_code == 400
                time.sleep(0.1)


@pytest.fixture(scope="module")
def scraped(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with prometheus(service, tmp_path_factory.mktemp("prometheus")) as running, Traffic(service.url):
        yield running


def eventually(prom: Prometheus, exprs: list[str], seconds: float = 60.0) -> None:
    """Every expression has a number; rates need two scrapes, rules an evaluation more."""

    def missing() -> list[str]:
        return [expr for expr in exprs if not prom.has_data(expr)]

    wait_until(lambda: not missing(), seconds, said=missing)


def test_every_panel_of_the_dashboard_has_data(scraped: Prometheus) -> None:
    board = json.loads((ROOT / "deploy" / "grafana" / "tessera.json").read_text())
    exprs = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(exprs) > 40
    eventually(scraped, [expr.replace("$__rate_interval", "10s") for expr in exprs])


def test_the_picture_of_the_metrics_has_a_line_in_every_panel(
    scraped: Prometheus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    drawing = importlib.import_module("metrics_picture")
    span = drawing.Span(time.time() - 30, time.time(), rate_seconds=10)
    drawn = drawing.draw(scraped.url, span, tmp_path / "metrics.png", names={}, title="")
    assert drawn.keys() == set(drawing.PANELS) and all(drawn.values()), drawn
    with Image.open(tmp_path / "metrics.png") as picture:
        assert picture.format == "PNG"


def test_every_recording_rule_has_data(scraped: Prometheus) -> None:
    groups = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yaml").read_text())["groups"]
    eventually(scraped, [rule["record"] for group in groups for rule in group["rules"] if "record" in rule])


def test_no_alert_concerns_a_healthy_service(scraped: Prometheus) -> None:
    assert scraped.query('ALERTS{alertstate="firing"}') == []


def test_the_page_of_metrics_lists_what_there_is(scraped: Prometheus) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    listed: set[str] = set()
    for cell in re.findall(r"^\| (`[^|]*`) \|", page, re.MULTILINE):
        first, *others = re.findall(r"`([a-z_]+)`", cell)
        listed |= {first} | {
            name if name.startswith("tessera_") else _sibling(first, name) for name in others
        }
    eventually(scraped, ["tessera_info"])
    found = {
        re.sub(r"_(bucket|sum|count)$", "", name) for name in scraped.names() if name.startswith("tessera_")
    }
    assert found <= listed, found - listed
    assert listed - found <= RARE, listed - found


def _sibling(first: str, suffix: str) -> str:
    """The table writes the names of a family as the first one and the others' last words."""
    stem = first
    while not stem.endswith(("_cache", "_slab")):
        stem = stem.rpartition("_")[0]
    return stem + suffix
