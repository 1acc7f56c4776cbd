"""An adapter that lies alone, joined with its base: local directories, and a hub on this host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from tessera.checkpoint.source import Source, find
from tessera.errors import CheckpointError
from tessera.models import family_of, open_model
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.encoder import TINY
from tests.checkpoint.local_hub import local_hub
from tests.checkpoint.test_hub import run
from tests.models.adapting import adapt, config, low_rank
from tests.models.declaring import write

TENSORS = low_rank("encoder.layer.1.attention.self.query", TINY.hidden, TINY.hidden)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base"
    write_checkpoint(path, TINY)
    return path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def alone(base: Path, path: Path, **changes: Any) -> Path:
    path.mkdir()
    write(path / "adapter_config.json", config(**{"base_model_name_or_path": str(base), **changes}))
    save_file(TENSORS, path / "adapter_model.safetensors", {"format": "pt"})
    return path


def joined(path: Path) -> Source:
    return find(str(path), recognise=family_of)


def test_it_is_the_model_of_an_adapter_beside_its_base(base: Path, home: Path, tmp_path: Path) -> None:
    path = alone(base, tmp_path / "my-adapter")
    source = joined(path)
    assert source.name == "my-adapter" and source.directory.is_relative_to(home)
    beside = adapt(base, tmp_path / "beside", TENSORS, base_model_name_or_path=str(base))
    model = open_model(source.directory)
    assert model.fingerprint == open_model(beside).fingerprint != open_model(base).fingerprint
    assert model.output.pooling == "mean"
    # Another process finds it, and one that is told of it looks no further.
    assert joined(path) == source
    assert find(str(source.directory), recognise=family_of, known=source) == source
    assert {file.name for file in path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def test_what_an_adapter_declares_wins_over_its_base(base: Path, tmp_path: Path) -> None:
    path = alone(base, tmp_path / "adapter")
    write(path / "config.json", {"model_type": "no such"})
    kind = "sentence_transformers.models."
    entries = [
        {"idx": 0, "name": "0", "path": "", "type": f"{kind}Transformer"},
        {"idx": 1, "name": "1", "path": "other_Pooling", "type": f"{kind}Pooling"},
    ]
    write(path / "modules.json", entries)
    write(path / "other_Pooling" / "config.json", {"pooling_mode": "cls"})
    model: Any = open_model(joined(path).directory)
    assert model.output.pooling == "first"
    assert model.declared.prompts == {} != open_model(base).declared.prompts  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"base_model_name_or_path": None}, "base_model_name_or_path is missing"),
        ({"base_model_name_or_path": "/no/such"}, "base_model_name_or_path is '/no/such', no directory"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    ],
)
def test_an_adapter_without_a_base_is_refused(
    changes: dict[str, Any], complaint: str, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        joined(alone(base, tmp_path / "adapter", **changes))
    assert f"adapter/adapter_config.json: {complaint}" in caught.value.message


def test_an_adapter_of_an_adapter_is_refused(base: Path, tmp_path: Path) -> None:
    first = alone(base, tmp_path / "first")
    with pytest.raises(CheckpointError, match="which has an adapter of its own"):
        joined(alone(first, tmp_path / "second"))


def test_an_adapter_without_weights_is_refused(base: Path, tmp_path: Path) -> None:
    path = alone(base, tmp_path / "adapter")
    (path / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: there is no such file; no other"):
        joined(path)


@pytest.mark.service
def test_an_adapter_of_a_hub_is_downloaded_and_joined(base: Path, tmp_path: Path) -> None:
    path = alone(base, tmp_path / "adapter")
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    with local_hub(files | {"adapter_model.bin": b"never fetched"}) as hub:
        said = run(hub, tmp_path / "cache")
        assert not said.error and hub.sent.keys() == files.keys()
        folder = Path(said.source["directory"])
        assert folder.is_relative_to(tmp_path / "cache" / "tessera-adapters")
        assert open_model(folder).fingerprint == open_model(joined(path).directory).fingerprint
        assert run(hub, tmp_path / "cache", HF_HUB_OFFLINE="1").source["directory"] == str(folder)
        del hub.files["adapter_model.safetensors"], hub.files["adapter_model.bin"]
        error = run(hub, tmp_path / "another").error
        assert "adapter_config.json names adapter_model.safetensors, which the hub does not have" in error


@pytest.mark.service
def test_an_adapter_beside_its_base_is_downloaded_with_it(base: Path, tmp_path: Path) -> None:
    path = adapt(base, tmp_path / "beside", TENSORS)
    files = {
        file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }
    with local_hub(files) as hub:
        said = run(hub, tmp_path / "cache")
        assert not said.error and {"model.safetensors", "adapter_model.safetensors"} < hub.sent.keys()
        folder = Path(said.source["directory"])
        assert open_model(folder).fingerprint == open_model(path).fingerprint
