"""The launcher's variables: one table for the code, ``docs/settings.md`` and ``--help``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from docs.tables import variables

from tessera.frontend.settings import FrontendSettings
from tessera.launch.processes import frontend_flags, shared_flags, without_source
from tessera.launch.role import command
from tessera.launch.settings import (
    LaunchSettings,
    RoleSettings,
    SettingError,
    Shared,
    read_fields,
    settings,
    variable_of,
    variables_help,
)
from tessera.launch.variables import NO_SETTINGS, out_of_date, unknown
from tessera.settings import Field, fields_of
from tessera.worker.settings import WorkerSettings

ROOT = Path(__file__).parents[2]


def test_help_leaves_out_what_only_the_other_script_reads() -> None:
    e_p, agg = variables_help("e_p"), variables_help("agg")
    assert (
        "TESSERA_ENCODE_WORKERS, TESSERA_EMBED_WORKERS (one per GPU)" in e_p
        and "TESSERA_CUDA_MPS (auto)" in e_p
    )
    assert "TESSERA_ENCODE_WORKERS," not in agg and "TESSERA_AGG_WORKERS" in agg
    assert "TESSERA_AGG_WORKERS" not in e_p
    assert "`" not in e_p and "](" not in e_p


def test_every_variable_that_the_launcher_reads_is_in_the_table() -> None:
    rows = variables()
    read = {each.variable for each in settings()}
    # These are read elsewhere.
    named = set(re.findall(r"`([A-Z_]+)`", rows)) - {"TESSERA_PIP_ARGS", "OTEL_TRACES_EXPORTER"}
    assert named - {"OTEL_EXPORTER_OTLP_ENDPOINT"} == read
    flags = [each.setting.flag for each in settings() if each.setting.flag]
    assert len(flags) == len(set(flags)) > 30 and all(f"`{flag}`" in rows for flag in flags)


def test_what_is_empty_has_its_default_and_what_is_given_is_used() -> None:
    given = {
        "TESSERA_FRONTENDS": "2",
        "TESSERA_HOST": "",
        "TESSERA_MODEL_PATH": "/models/one/",
        "TESSERA_READY_TIMEOUT_SECONDS": "0.5",
    }
    found = LaunchSettings.read(given)
    assert (found.frontends, found.dyn_http_host) == (2, "127.0.0.1")
    assert (found.model_name, found.ready_timeout_seconds) == ("one", 0.5)
    assert found.of_dynamo()["DYN_DISCOVERY_BACKEND"] == "file"
    assert (found.named("frontends"), found.named("dyn_http_port")) == (
        "TESSERA_FRONTENDS=2",
        "TESSERA_PORT=8000",
    )


@pytest.mark.parametrize("text", ["one,two", " one two one", "one, two,"])
def test_a_model_has_several_names_and_the_first_is_said(text: str) -> None:
    given = {"TESSERA_DIMENSIONS_ALLOWED": "64-96", "TESSERA_MAX_EMBED_TOKENS": "2000"}
    found = LaunchSettings.read({"TESSERA_SERVED_MODEL_NAME": text, **given})
    assert (found.model_names, found.model_name) == (["one", "two"], "one")
    flags = shared_flags(found)
    at = flags.index("--served-model-name")
    assert flags[at : at + 4] == ["--served-model-name", "one", "two", "--namespace"]
    assert frontend_flags(found, 8000)[-3:] == ["--dimensions-allowed=64-96", "--max-embed-tokens", "2000"]


@pytest.mark.parametrize("value", ["two", "-1", "01", "1.5", " 1"])
def test_what_is_no_whole_number_is_refused(value: str) -> None:
    with pytest.raises(SettingError, match=f"^TESSERA_FRONTENDS={value}: is not a whole number$"):
        LaunchSettings.read({"TESSERA_FRONTENDS": value})


@pytest.mark.parametrize(
    "name", ["TESSERA_CUDA_MPS", "TESSERA_LOG_LEVEL", "TESSERA_FRONTEND_PAGE", "DYN_DISCOVERY_BACKEND"]
)
def test_what_is_none_of_a_few_is_refused(name: str) -> None:
    with pytest.raises(SettingError, match=f"^{name}=maybe: is none of .*, "):
        LaunchSettings.read({name: "maybe"})


def test_a_setting_may_be_what_the_processes_take() -> None:
    both = [*every(FrontendSettings), *every(WorkerSettings)]
    known = {field.setting.flag: field.choices for field in both}
    for each in settings():
        assert each.choices == known.get(each.setting.flag, each.choices)
    assert sum(bool(each.choices) for each in settings()) == 8


def test_a_task_is_an_option_of_the_model() -> None:
    given = {"TESSERA_TASK": "embed", "TESSERA_MODEL_OPTIONS": '{"max_tokens": 64}'}
    assert json.loads(LaunchSettings.read(given).model_options) == {"max_tokens": 64, "task": "embed"}
    assert json.loads(LaunchSettings.read({"TESSERA_TASK": "embed"}).model_options) == {"task": "embed"}
    assert LaunchSettings.read({"TESSERA_TASK": "auto"}).model_options == ""
    no_object = {"TESSERA_TASK": "embed", "TESSERA_MODEL_OPTIONS": "[1"}
    assert LaunchSettings.read(no_object).model_options == "[1"


def every(kind: type[msgspec.Struct]) -> Iterator[Field]:
    """The fields of settings and of their parts."""
    for field in fields_of(kind):
        yield from every(field.part) if field.part is not None else (field,)


@pytest.mark.parametrize(
    ("flags", "ports"),
    [
        ("", {}),
        ("--no-page", {}),
        ("--grpc-port 8001 --no-page", {"--grpc-port": "8001"}),
        ("--no-page --grpc-port=8001", {"--grpc-port": "8001"}),
        ("--grpc-port 1 --grpc-port 2", {"--grpc-port": "1"}),
        ("--grpc-port", {"--grpc-port": ""}),
    ],
)
def test_ports_of_doors_are_as_they_were_written(flags: str, ports: dict[str, str]) -> None:
    assert LaunchSettings.read({"TESSERA_FRONTEND_ARGS": flags}).door_ports == ports


@pytest.mark.parametrize(("before", "after"), [({}, None), ({"PYTHONPATH": "/a:/b"}, "/a:/b")])
def test_children_do_not_see_the_source_that_the_launcher_runs_from(
    before: dict[str, str], after: str | None
) -> None:
    path = os.pathsep.join([str(ROOT / "components/src"), *before.values()])
    assert without_source({"PYTHONPATH": path}, ROOT).get("PYTHONPATH") == after
    assert without_source(before, ROOT) == before


@pytest.mark.parametrize(
    ("model", "name"),
    [("org/name", "org/name"), ("org/name@v1", "org/name"), ("/models/one/", "one"), ("one", "one")],
)
def test_a_model_is_called_as_the_hub_or_its_directory_calls_it(model: str, name: str) -> None:
    settings = LaunchSettings.read({"TESSERA_MODEL_PATH": model})
    assert settings.model_name == name
    assert settings.hub_model == (name if "org" in model else None)


def test_a_role_is_given_the_name_that_it_downloads() -> None:
    given = {"TESSERA_MODEL_PATH": "org/name", "TESSERA_REVISION": "v1", "TESSERA_HOST_ADDRESS": "127.0.0.1"}
    _, words, _ = command(["frontend"], given)
    flags = " ".join(words)
    assert "--model-path org/name --revision v1 " in flags and "--served-model-name org/name " in flags
    with pytest.raises(
        SettingError, match=r"TESSERA_MODEL_PATH=org/name@v2: .* another revision than --revision v1"
    ):
        command(["frontend"], given | {"TESSERA_MODEL_PATH": "org/name@v2"})


@pytest.mark.parametrize("kind", [LaunchSettings, RoleSettings])
def test_a_name_of_before_works_and_says_the_one_of_now(kind: type[Shared]) -> None:
    for each in read_fields(kind):
        text = "7" if each.kind in (int, float) else (*each.choices, "seven")[0]
        old, new = each.name.upper(), each.variable
        by_old, by_new = kind.read({old: text}), kind.read({new: text, old: "never read"})
        assert getattr(by_old, each.name) == getattr(by_new, each.name), old
        assert by_new.named(each.name) == f"{new}={text}"
        sentences = out_of_date({old: text}, kind, scripts=True)
        assert sentences == [] or [f"{old} is called {new} now" in said for said in sentences] == [True]
        # Dynamo and others have the rest.
        assert bool(sentences) is not variable_of(each).others


def test_variables_of_ours_that_nobody_reads_are_named_with_what_was_meant() -> None:
    given = {
        "TESSERA_MAX_INPUT": "3",
        "TESSERA_PORTT": "3",
        # Read by frontends, workers, the launcher, and for keys.
        **dict.fromkeys(("TESSERA_MAX_INPUTS", "TESSERA_ENCODE_WAIT_SECONDS", "TESSERA_FRONTENDS"), "3"),
        **dict.fromkeys(NO_SETTINGS, "x"),
        # As Kubernetes says of a service that is called tessera.
        "TESSERA_PORT": "tcp://10.0.0.1:8000",
        "TESSERA_SERVICE_HOST": "10.0.0.1",
        "TESSERA_SERVICE_PORT_HTTP": "8000",
        "TESSERA_PORT_8000_TCP_ADDR": "10.0.0.1",
        "TESSERA_EMPTY": "",
        "OTHER": "x",
    }
    assert unknown(given) == [
        "TESSERA_MAX_INPUT does nothing: no setting has such a variable, did you mean TESSERA_MAX_INPUTS?",
        "TESSERA_PORTT does nothing: no setting has such a variable, did you mean TESSERA_PORT?",
    ]
    assert LaunchSettings.read(given).dyn_http_port == 8000


def test_every_variable_of_ours_in_the_source_is_a_setting_or_known_as_none() -> None:
    source = "".join(path.read_text() for path in (ROOT / "components/src").rglob("*.py"))
    named = set(re.findall(r"\bTESSERA_[A-Z_]+[A-Z]\b", source))
    assert len(named) > 10 and unknown(dict.fromkeys(named, "x")) == []
