from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tessera.errors import ConfigError
from tessera.models.llama_nemotron_vl.config import read_config
from tessera_tools.random_checkpoint import checkpoint
from tessera_tools.random_checkpoint.checkpoint import main, write_checkpoint
from tessera_tools.random_checkpoint.llama import tokenizer_json
from tessera_tools.random_checkpoint.llama_nemotron_vl import (
    FULL,
    TINY,
    all_shapes,
    config_json,
    processor_json,
)
from tessera_tools.random_checkpoint.weights import _encoded
from tests.models.llama_nemotron_vl.conftest import SMALL


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.starts
@pytest.mark.parametrize("shards", [1, 3])
def test_equal_arguments_give_equal_bytes_in_every_process(tmp_path: Path, shards: int) -> None:
    spec = dataclasses.replace(SMALL, shards=shards)
    write_checkpoint(tmp_path / "here", spec, seed=5, dtype="bfloat16")
    code = (
        "import sys, dataclasses, pathlib\n"
        "from tessera_tools.random_checkpoint.checkpoint import write_checkpoint\n"
        "from tessera_tools.random_checkpoint.llama_nemotron_vl import CheckpointSpec\n"
        f"spec = CheckpointSpec(image_size=64, base_vocab=600, shards={shards})\n"
        "write_checkpoint(pathlib.Path(sys.argv[1]), spec, seed=5, dtype='bfloat16')\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "there")], check=True, timeout=180)
    assert contents(tmp_path / "here") == contents(tmp_path / "there")


def test_seeds_differ(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_checkpoint(tmp_path / str(seed), SMALL, seed=seed)
    one, other = contents(tmp_path / "0"), contents(tmp_path / "1")
    assert one["config.json"] == other["config.json"]
    assert one["model.safetensors"] != other["model.safetensors"]


def test_the_default_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--out", str(tmp_path / "deep" / "tiny")])
    assert "tiny float32 checkpoint" in capsys.readouterr().out
    assert sorted(contents(tmp_path / "deep" / "tiny")) == [
        "config.json",
        "config_sentence_transformers.json",
        "model.safetensors",
        "processor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["tiny"]
    config = read_config(tmp_path / "deep" / "tiny")
    assert config.tokens_per_tile == 256
    assert config.max_tiles == 7
    with safe_open(tmp_path / "deep" / "tiny" / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert file.get_tensor("language_model.embed_tokens.weight").dtype == torch.float32
    assert "vision_model.vision_model.head.probe" in names
    assert "lm_head.weight" not in names


def test_the_full_shapes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json(FULL, "bfloat16")))
    (tmp_path / "processor_config.json").write_text(json.dumps(processor_json(FULL)))
    sizes = {name: math.prod(shape) for name, shape in all_shapes(read_config(tmp_path)).items()}

    def total(start: str) -> int:
        return sum(size for name, size in sizes.items() if name.startswith(start))

    assert total("") == 1_678_252_480
    assert total("text.") == 1_235_834_880
    assert total("vision.head.") == 15_238_352
    assert total("vision.") == 413_534_448 + 15_238_352
    assert total("projector.") == 13_644_800
    assert FULL.vocab_size == 128266
    assert config_json(FULL, "bfloat16")["img_context_token_id"] == 128258


def test_the_full_vocabulary() -> None:
    parsed = tokenizer_json(FULL, 0)
    assert len(parsed["model"]["vocab"]) == 128000
    assert sorted(parsed["model"]["vocab"].values()) == list(range(128000))
    ids = {token["content"]: token["id"] for token in parsed["added_tokens"]}
    assert len(ids) == 266
    assert ids["<|begin_of_text|>"] == 128000
    assert ids["<|end_of_text|>"] == 128001
    assert (ids["<img>"], ids["</img>"], ids["<IMG_CONTEXT>"]) == (128256, 128257, 128258)
    assert max(ids.values()) == 128265


def test_something_in_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        write_checkpoint(tmp_path / "there", SMALL)
    with pytest.raises(SystemExit) as caught:
        main(["--out", str(tmp_path / "there")])
    assert caught.value.code == 1
    assert "exists already" in capsys.readouterr().err


def test_nothing_is_left_of_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "write_weights", fail)
    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(tmp_path / "there", SMALL)
    assert list(tmp_path.iterdir()) == []


def test_another_process_was_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(*_: object, **__: object) -> None:
        (tmp_path / "there").mkdir()
        (tmp_path / "there" / "theirs").touch()

    monkeypatch.setattr(checkpoint, "write_weights", meanwhile)
    write_checkpoint(tmp_path / "there", SMALL)
    assert [file.name for file in tmp_path.rglob("*")] == ["there", "theirs"]


def test_rounding_to_bfloat16_is_torchs() -> None:
    values = np.random.default_rng(0).standard_normal(10_000, dtype=np.float32)
    values[:4] = [0.0, 1.0, -1.0, 1.00390625]
    expected = torch.from_numpy(values).to(torch.bfloat16)
    found = torch.frombuffer(bytearray(_encoded(values, "bfloat16")), dtype=torch.bfloat16)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("changes", [{"base_vocab": 200}, {"control_tokens": 3}])
def test_vocabularies_without_room(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="no room"):
        tokenizer_json(dataclasses.replace(TINY, **changes), 0)
