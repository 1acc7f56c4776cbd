"""The launcher's variables: one table for the code, ``docs/settings.md`` and ``--help``."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pytest

from tessera.launch.processes import without_source
from tessera.launch.settings import (
    TABLE,
    LaunchSettings,
    RoleSettings,
    SettingError,
    table_help,
)

ROOT = Path(__file__).parents[2]


def test_help_leaves_out_what_only_the_other_script_reads() -> None:
    whole, part = table_help(), table_help(without="e_p.sh")
    assert "ENCODE_WORKERS, EMBED_WORKERS (one a card)" in whole and "CUDA_MPS (auto)" in whole
    assert "ENCODE_WORKERS," not in part and "AGG_WORKERS" in part
    assert "AGG_WORKERS" not in table_help(without="agg.sh")
    assert "`" not in whole and "](" not in whole


def test_the_table_names_variables_that_are_read() -> None:
    read = {field.name.upper() for kind in (LaunchSettings, RoleSettings) for field in fields(kind)}
    # scripts/setup reads these two, and the processes themselves the second.
    read |= {"PIP_ARGS", "OTEL_TRACES_EXPORTER"}
    for row in TABLE:
        *prefixes, name = row.names.split(", ")
        for prefix in prefixes:
            named = prefix + name.partition("_")[2] if prefix.endswith("_") else prefix
            assert named in read, named
        assert name in read, name


def test_what_is_empty_has_its_default_and_what_is_given_is_used() -> None:
    given = {
        "FRONTENDS": "2",
        "DYN_HTTP_HOST": "",
        "MODEL_PATH": "/models/one/",
        "READY_TIMEOUT_SECONDS": "0.5",
    }
    settings = LaunchSettings.read(given)
    assert (settings.frontends, settings.dyn_http_host) == (2, "127.0.0.1")
    assert (settings.model_name, settings.ready_timeout_seconds) == ("one", 0.5)
    assert settings.of_dynamo()["DYN_DISCOVERY_BACKEND"] == "file"


@pytest.mark.parametrize("value", ["two", "-1", "01", "1.5", " 1"])
def test_what_is_no_whole_number_is_refused(value: str) -> None:
    with pytest.raises(SettingError, match=f"^FRONTENDS={value}: is not a whole number$"):
        LaunchSettings.read({"FRONTENDS": value})


@pytest.mark.parametrize(("before", "after"), [({}, None), ({"PYTHONPATH": "/a:/b"}, "/a:/b")])
def test_children_do_not_see_the_source_that_the_launcher_runs_from(
    before: dict[str, str], after: str | None
) -> None:
    path = os.pathsep.join([str(ROOT / "components/src"), *before.values()])
    assert without_source({"PYTHONPATH": path}, ROOT).get("PYTHONPATH") == after
    assert without_source(before, ROOT) == before
