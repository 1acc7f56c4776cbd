"""The models of a service: which are told apart, their places, and what frontends read of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tessera.frontend.model_settings import read_models
from tessera.launch.models import Deployed, WantedModel, check_apart, document, free_slot, wanted_models
from tessera.launch.processes import agg_workers, worker_processes
from tessera.launch.settings import LaunchSettings, SettingError
from tessera.worker.settings import parse


def model(path: str, said: str = "", **given: str) -> WantedModel:
    settings = LaunchSettings.read({"TESSERA_MODEL_PATH": path, **given})
    return WantedModel.one_of_several(settings, split=False, said=said or path)


def deployed(wanted: WantedModel, slot: int = 0, workers: int = 1) -> Deployed:
    kinds = agg_workers(LaunchSettings.read({"TESSERA_AGG_WORKERS": str(workers)}), ())
    return Deployed(wanted=wanted, slot=slot, settings=wanted.settings, workers=kinds)


def test_each_has_a_namespace_by_its_first_name_unless_it_has_its_own() -> None:
    assert model("nvidia/Some_Model.v2").settings.dyn_namespace == "tessera-nvidia-some-model-v2"
    assert (
        model("/models/one", TESSERA_SERVED_MODEL_NAME="A b", DYN_NAMESPACE="x").settings.dyn_namespace
        == "x-a"
    )
    own = WantedModel.one_of_several(LaunchSettings(dyn_namespace="mine"), own_namespace=True, split=False)
    assert own.settings.dyn_namespace == "mine"


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"TESSERA_SERVED_MODEL_NAME": "two,ONE.A"}, r"^b: 'ONE\.A' is the name of a already"),
        (
            {"TESSERA_SERVED_MODEL_NAME": "one-a"},
            "^b: its workers would be in 'tessera-one-a' like those of a",
        ),
    ],
)
def test_two_that_could_not_be_told_apart_are_refused_by_name(second: dict[str, str], said: str) -> None:
    first = model("/models/x", "a", TESSERA_SERVED_MODEL_NAME="one_a")
    with pytest.raises(SettingError, match=said):
        check_apart([first, model("/models/y", "b", **second)])
    check_apart([first, model("/models/y", "b", TESSERA_SERVED_MODEL_NAME="two")])


def test_the_variable_names_several_with_commas_between_them(tmp_path: Path) -> None:
    several, found = wanted_models(LaunchSettings(model_path="/models/one, org/two"), split=True)
    assert several and [each.settings.model_path for each in found] == ["/models/one", "org/two"]
    assert all(each.split for each in found)
    with pytest.raises(SettingError, match=r"^/models/one: no such directory"):
        found[0].check()
    odd = tmp_path / "one,two"
    odd.mkdir()
    several, (alone,) = wanted_models(LaunchSettings(model_path=str(odd)), split=False)
    with pytest.raises(SettingError, match=r"one,two: there is no config\.json in it, so"):
        alone.check()
    # Everything of it stays as it was before there were several.
    assert not several and alone.settings == LaunchSettings(model_path=str(odd))


def test_a_slot_is_the_lowest_that_is_free() -> None:
    assert [free_slot([]), free_slot([0, 1]), free_slot([0, 2, 3]), free_slot([1])] == [0, 2, 1, 0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TESSERA_MODEL_OPTIONS", "[1]"),
        ("TESSERA_MODEL_OPTIONS", "{"),
        ("TESSERA_EXPECT_EMBED_WORKERS", "two"),
    ],
)
def test_what_frontends_could_not_read_is_refused(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(SettingError, match=f"^{name}={re.escape(value)}: "):
        model(str(tmp_path), **{name: value}).check()


def test_a_directory_of_a_model_has_its_configuration_or_names_the_folder_of_it(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"there is no config\.json in it"):
        model(str(tmp_path)).check()
    (tmp_path / "modules.json").touch()
    model(str(tmp_path)).check()


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"TESSERA_DIMENSIONS_ALLOWED": "8-16", "TESSERA_EXPECT_EMBED_WORKERS": "3"}, True),
        ({"TESSERA_SERVED_MODEL_NAME": "one,uno"}, True),
        ({"TESSERA_MODEL_OPTIONS": '{"a": 1}'}, False),
        ({"TESSERA_AGG_WORKERS": "2"}, False),
    ],
)
def test_workers_stay_where_frontends_alone_see_a_difference(given: dict[str, str], same: bool) -> None:
    before, after = model("/models/one"), model("/models/one", **given)
    assert before != after and (before.of_workers == after.of_workers) is same
    if same:
        found = deployed(before, slot=4)
        found.follow(after)
        expected = json.loads(document([deployed(after, slot=4)]))
        assert json.loads(document([found])) == expected != json.loads(document([deployed(before, slot=4)]))


def test_frontends_and_workers_find_each_other_by_what_they_are_told(
    checkpoint: Path, tmp_path: Path
) -> None:
    one = deployed(
        model(
            str(checkpoint),
            TESSERA_SERVED_MODEL_NAME="one uno",
            TESSERA_EXPECT_EMBED_WORKERS="5",
            TESSERA_MODEL_OPTIONS="{}",
            TESSERA_DIMENSIONS_ALLOWED="8-16",
            TESSERA_MAX_EMBED_TOKENS="2000",
        )
    )
    two = deployed(model("org/two"), slot=3, workers=2)
    two.loading = "is being downloaded"
    path = tmp_path / "models.json"
    path.write_text(document([one, two]))
    first, second = read_models(path, "tessera")
    assert (first.served_model_names, first.expected_embed, first.dimensions_allowed) == (
        ("one", "uno"),
        5,
        "8-16",
    )
    assert (first.max_embed_tokens, second.max_embed_tokens) == (2000, 0)
    assert (second.name, second.loading, second.slot, second.expected_embed) == (
        *("org/two", "is being downloaded"),
        *(3, 2),
    )
    (process,) = worker_processes(one.settings, one.workers, {}, [[[]]], [18000])
    worker = parse(process.arguments[2:])
    assert first.embed_endpoint == f"dyn://{worker.rpc.namespace}.embed.generate"
    assert first.encode_endpoint == worker.encode_endpoint
    assert worker.served_model_names == first.served_model_names
    assert json.loads(path.read_text())["models"][0]["source"] is None
