"""The alerts, the recording rules and the dashboard, as files."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from tests.e2e.service import ROOT

FOLDER = ROOT / "deploy" / "prometheus"
TESTS = Path(__file__).parent / "prometheus" / "rules_test.yaml"

promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is missing"
)


@pytest.mark.starts
@promtool
def test_every_rule_does_what_its_test_says(tmp_path: Path) -> None:
    for path in (FOLDER / "rules.yaml", TESTS):
        shutil.copy(path, tmp_path)
    ran = subprocess.run(
        ["promtool", "test", "rules", TESTS.name], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@promtool
@pytest.mark.parametrize("name", ["launch.yaml"])
def test_the_configurations_are_valid(name: str) -> None:
    ran = subprocess.run(
        ["promtool", "check", "config", FOLDER / name], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_alert_is_made_to_fire_and_to_keep_quiet() -> None:
    groups = yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    tests = yaml.safe_load(TESTS.read_text())["tests"]
    fires, quiet = set(), set()
    for test in tests:
        for case in test["alert_rule_test"]:
            (fires if case.get("exp_alerts") else quiet).add(case["alertname"])
    assert fires == quiet == alerts


def test_the_dashboard_is_what_its_source_makes() -> None:
    made = runpy.run_path(str(ROOT / "deploy" / "grafana" / "dashboard.py"))
    assert made["OUT"].read_text() == made["build"](), "run: python deploy/grafana/dashboard.py"


def test_grafana_finds_the_dashboard_and_what_it_asks() -> None:
    """By what it is given to read at its start, in the places where compose.yaml mounts it."""
    folder = ROOT / "deploy"
    compose = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    mounted = {
        inside: folder / source
        for source, inside, _ in (
            volume.split(":") for volume in compose["grafana"]["volumes"] if volume.endswith(":ro")
        )
    }
    provisioning = mounted["/etc/grafana/provisioning"]
    (provider,) = yaml.safe_load((provisioning / "dashboards/tessera.yaml").read_text())["providers"]
    board = json.loads((mounted[provider["options"]["path"]] / "tessera.json").read_text())
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    host = urlsplit(source["url"]).hostname
    assert host in compose and set(compose[host]["networks"]) & set(compose["grafana"]["networks"])
    # The dashboard lets its reader choose among sources of that kind, of which this is the first.
    (variable,) = board["templating"]["list"]
    assert (variable["name"], variable["query"]) == ("datasource", source["type"]) and source["isDefault"]
    used = {
        (target["datasource"]["type"], target["datasource"]["uid"])
        for panel in board["panels"]
        for target in panel.get("targets", ())
    }
    assert used == {(source["type"], "${datasource}")}
