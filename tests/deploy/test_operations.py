"""The operations page: it explains every alert, and its example is what the command says."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from tessera.frontend.settings import Limits
from tessera_tools.sizing import main
from tests.e2e.service import ROOT

PAGE = (ROOT / "docs/operations.md").read_text()


def test_every_alert_is_explained() -> None:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yaml").read_text())
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    explained = re.findall(r"^\| `(Tessera\w+)` \|", PAGE, re.MULTILINE)
    assert sorted(explained) == sorted(alerts)


def test_the_example_of_sizing_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"^\$ tessera sizing (.*)\n((?:.*\n)*?)```", PAGE, re.MULTILINE)
    assert found is not None
    assert main(shlex.split(found[1])) == 0
    assert capsys.readouterr().out == found[2]


def test_the_limits_are_the_defaults() -> None:
    limits = Limits()
    assert f"| `--max-body-mb` | {limits.max_body_bytes >> 20} |" in PAGE
    for name in ("inputs", "images"):
        assert f"| `--max-{name}` | {getattr(limits.request, name)} | {name} in one request |" in PAGE
    assert f"| `--max-in-flight` | {limits.max_in_flight} | requests in progress; more are" in PAGE
    timeout = (
        f"| `--request-timeout-seconds` | {limits.timeout_seconds:.0f} | time to answer a request, then 504 |"
    )
    assert timeout in PAGE
