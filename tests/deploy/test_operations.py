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
    seconds = f"{limits.timeout_seconds:.0f}"
    for row in (
        ("max-body-mb", limits.max_body_bytes >> 20, "largest body of a request"),
        *(
            (f"max-{name}", getattr(limits.request, name), f"{name} in one request")
            for name in ("inputs", "images")
        ),
        ("max-in-flight", limits.max_in_flight, "requests in progress; more are refused with 429"),
        ("request-timeout-seconds", seconds, "time to answer a request, then 504"),
    ):
        name, default, text = row
        variable = f"TESSERA_{name.replace('-', '_').upper()}"
        assert f"| `--{name}` | `{variable}` | {default} | {text} |" in PAGE
