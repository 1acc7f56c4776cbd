"""Files that list models, as frontends read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tessera.errors import ConfigError
from tessera.frontend.model_settings import read_models
from tessera.frontend.settings import parse
from tessera.model_names import namespace_of


def written(folder: Path, *models: Any, **others: Any) -> Path:
    path = folder / "models.yaml"
    path.write_text(json.dumps({"models": [*models], **others}))
    return path


def test_a_list_gives_each_model_a_place_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "Some_Model").mkdir()
    other = {
        "model_path": str(tmp_path),
        "served_model_names": ["ORG/Other.v2", "short"],
        "model_options": {"max_pixels": 1},
        "expected_embed": 2,
        "slot": 7,
        "encode_endpoint": "dyn://elsewhere.encode.generate",
    }
    first, second = read_models(written(tmp_path, {"model_path": str(tmp_path / "Some_Model")}, other), "ns")
    assert (first.name, first.slot, first.embed_endpoint) == (
        "Some_Model",
        0,
        "dyn://ns-some-model.embed.generate",
    )
    assert (second.name, second.slot, second.expected_embed) == ("ORG/Other.v2", 7, 2)
    assert second.embed_endpoint == "dyn://ns-org-other-v2.embed.generate"
    assert second.encode_endpoint == "dyn://elsewhere.encode.generate"
    assert second.model_options == {"max_pixels": 1}


def test_a_model_that_is_not_there_yet_is_not_looked_for(tmp_path: Path) -> None:
    waiting = {"model_path": "org/model", "loading": "is being downloaded"}
    (found,) = read_models(written(tmp_path, waiting), "ns")
    assert (found.name, found.loading) == ("model", "is being downloaded")


def test_namespaces_are_the_same_however_a_name_is_written() -> None:
    assert (
        namespace_of("ns", "NVIDIA/llama_3.2")
        == namespace_of("ns", "nvidia/Llama-3_2")
        == "ns-nvidia-llama-3-2"
    )


HERE = "."


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ([], "must be a list of models"),
        (["m"], r"models\[0\]: must hold a mapping"),
        ([{"served_model_names": ["m"]}], r"models\[0\]: model_path: names no checkpoint"),
        ([{"model_path": HERE, "model_name": "m"}], r"models\[0\]: .*model_name"),
        ([{"model_path": HERE, "slot": 64}], "slot: must be 0 to 63"),
        ([{"model_path": HERE, "expected_embed": "two"}], "expected_embed"),
        ([{"model_path": HERE, "dimensions_allowed": "wide"}], "dimensions_allowed"),
        ([{"model_path": HERE, "max_embed_tokens": -1}], "max_embed_tokens: must not be negative"),
        (
            [
                {"model_path": HERE, "served_model_names": ["a", "Some.Name"]},
                {"model_path": HERE, "served_model_names": ["some_name"]},
            ],
            "'some_name' would be the name of two models, 'a' and 'some_name'",
        ),
        (
            [
                {"model_path": HERE, "served_model_names": ["a"], "slot": 1},
                {"model_path": HERE, "served_model_names": ["b"], "slot": 1},
            ],
            "'a' and 'b' have the same slot, 1",
        ),
        (
            [
                {"model_path": HERE, "served_model_names": ["a/b"]},
                {"model_path": HERE, "served_model_names": ["a-b"]},
            ],
            "'a/b' and 'a-b' have the same workers",
        ),
    ],
)
def test_what_a_list_may_not_say(tmp_path: Path, models: list[Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_models(written(tmp_path, *models), "ns")


def test_a_file_that_is_no_list_is_named(tmp_path: Path) -> None:
    for content, words in (
        (b"models: [", "not valid YAML"),
        (b"- a", "must hold a mapping"),
        (b"", "must hold"),
    ):
        path = tmp_path / "models.yaml"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=words) as caught:
            read_models(path, "ns")
        assert str(path) in caught.value.message
    with pytest.raises(ConfigError, match="No such file"):
        read_models(tmp_path / "none.yaml", "ns")


def test_a_frontend_serves_one_model_or_a_list(tmp_path: Path) -> None:
    path = str(written(tmp_path, {"model_path": str(tmp_path)}))
    (model,) = parse(["--models", path]).models
    assert model.name == tmp_path.name
    for flags, words in (
        ([], "--model-path or --models"),
        (["--models", path, "--revision", "a"], "no flags"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse(flags)
