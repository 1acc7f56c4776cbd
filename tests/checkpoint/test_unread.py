"""What is said of a folder that holds something else than a checkpoint: what it holds, and the way out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tessera.checkpoint.source import find
from tessera.checkpoint.unread import checkpoint_instead, files_below, weights_instead
from tessera.checkpoint.weights import weight_files
from tessera.errors import CheckpointError
from tessera.models import family_of

_SHARD = "model-00001-of-00002.safetensors"
_MADE = "serve the model that it was made from"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model-Q4_K_M.gguf", f"is for llama.cpp (GGUF); {_MADE}"),
        ("onnx/model.onnx", f"is for ONNX; {_MADE}"),
        ("openvino/openvino_model.xml", f"is for OpenVINO; {_MADE}"),
        ("tf_model.h5", "is for TensorFlow or Flax; save_pretrained of transformers writes safetensors"),
        (
            "flax_model.msgpack",
            "is for TensorFlow or Flax; save_pretrained of transformers writes safetensors",
        ),
        (".cache/huggingface/download/x.incomplete", "is of a download that did not end; run it again"),
        (_SHARD, "is a shard without model.safetensors.index.json; run the download again"),
        ("consolidated.safetensors", "has another name than model.safetensors"),
    ],
)
def test_what_stands_in_the_place_of_weights_is_named(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()
    (tmp_path / "config.json").touch()
    with pytest.raises(
        CheckpointError, match=f"no other weight format is read: {re.escape(f'{name} {said}')}$"
    ):
        weight_files(tmp_path)


def test_nothing_is_guessed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"no other weight format is read$"):
        weight_files(tmp_path)
    assert checkpoint_instead(tmp_path) == ""


def test_a_folder_without_a_configuration_leads_to_the_one_that_has_it(tmp_path: Path) -> None:
    """As the cache of a hub lies, whose snapshots have folders of modules."""
    snapshot = tmp_path / "snapshots" / "abc"
    (snapshot / "1_Pooling").mkdir(parents=True)
    for folder in (snapshot, snapshot / "1_Pooling"):
        (folder / "config.json").touch()
    with pytest.raises(CheckpointError, match=r"is no checkpoint: snapshots/abc in it has one; name that$"):
        family_of(tmp_path)


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin.index.json"])
def test_weights_without_a_configuration_are_half_a_download(tmp_path: Path, weights: str) -> None:
    """Whatever other formats are beside them, and modules, whose configurations are no checkpoints'."""
    for name in (weights, "1_Pooling/config.json", "onnx/model.onnx"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    said = f"is no checkpoint: {weights} is there without it; run the download again"
    with pytest.raises(CheckpointError, match=f"{re.escape(said)}$"):
        family_of(tmp_path)
    assert weights_instead([weights, "training_args.bin"]) == ""
    (tmp_path / weights).unlink()
    with pytest.raises(CheckpointError, match=r"is no checkpoint: onnx/model\.onnx is for ONNX"):
        family_of(tmp_path)


def test_a_file_is_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a model of a hub, though its path may have the form of one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").touch()
    with pytest.raises(CheckpointError, match=r"bert/config\.json: is a file; name the directory"):
        find("bert/config.json", recognise=family_of)


def test_missing_shards_are_counted(tmp_path: Path) -> None:
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / _SHARD)
    placed = {"a": _SHARD, "b": _SHARD.replace("00001", "00002")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    said = "index.json: names model-00002-of-00002.safetensors, which is not there: 1 of 2 files are missing"
    with pytest.raises(CheckpointError, match=said):
        weight_files(tmp_path)


def test_a_whole_disk_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessera.checkpoint.unread._MOST_FOLDERS", 3)
    for number in range(6):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "file").touch()
    assert len(files_below(tmp_path)) == 2
