from __future__ import annotations

import csv
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
from benchmarks.accuracy import compared
from benchmarks.products import text_tower, vision_tower
from safetensors import safe_open

from benchmarks import engine
from tessera.errors import ConfigError
from tessera.models import open_model
from tessera.rows import Rows
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.encoder import RERANK_TINY, SPLADE_TINY
from tessera_tools.random_checkpoint.llama_nemotron_vl import TINY
from tessera_tools.random_checkpoint.ministral3 import VL_TINY as NEMOTRON_VL
from tessera_tools.random_checkpoint.qwen3 import VL_TINY


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen") / "model"
    write_checkpoint(path, VL_TINY)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of small tiles, which cost a twentieth of the usual ones."""
    path = tmp_path_factory.mktemp("llama") / "model"
    write_checkpoint(path, replace(TINY, image_size=64))
    return path


def test_one_table_with_every_workload(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--size",
        "tiny",
        "--model-path",
        str(llama),
        "--seconds",
        "0.01",
        "--out",
        str(tmp_path),
    ]
    assert engine.main(arguments) == 0
    with (tmp_path / "engine.csv").open() as file:
        rows = list(csv.reader(file))
    assert tuple(rows[0]) == engine.HEADER
    assert {"vision, 1 x page 150x200", "text, 16 tokens", "image 64x48 + text"} <= {row[0] for row in rows}
    assert "worst cosine against float32: text 1.000000, vision rows 1.000000" in capsys.readouterr().out


def test_engines_of_an_engine_config(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "engines.yaml"
    config.write_text("vision: {max_batch_cost: 2}\ntext: {max_batch_cost: 64, max_queue_cost: 64}\n")
    arguments = ["--size", "tiny", "--model-path", str(llama), "--config", str(config)]
    assert engine.main([*arguments, "--seconds", "0.01", "--no-check"]) == 0
    # Each image is more tiles than the budget has room for, and so a batch of its own.
    shown = capsys.readouterr().out
    assert "vision, 1 x image" in shown and "2 x image" not in shown
    config.write_text("vision: {engine: tensorrt, max_batch_cost: 2}\n")
    with pytest.raises(ConfigError, match="needs path"):
        engine.main([*arguments, "--seconds", "0.01"])


def weights(path: Path, prefixes: tuple[str, ...], *, besides: tuple[str, ...]) -> int:
    """Numbers in the stored matrices below the prefixes."""
    found = 0
    for file in path.glob("*.safetensors"):
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                shape = tensors.get_slice(name).get_shape()
                if name.startswith(prefixes) and len(shape) > 1 and not name.endswith(besides):
                    found += prod(shape)
    return found


def test_products_count_every_weight_once(checkpoint: Path, qwen: Path) -> None:
    """A token meets each matrix of its stage once, and a tile each as often as it has rows there."""
    for path, prefix in ((checkpoint, "language_model."), (qwen, "model.language_model.")):
        tower = text_tower(open_model(path))
        stored = weights(path, (prefix,), besides=("embed_tokens.weight",))
        assert sum(product.flops for product in tower.products(5)) == 2 * 5 * stored
    model = open_model(qwen)
    stored = weights(qwen, ("model.visual.",), besides=("pos_embed.weight", "patch_embed.proj.weight"))
    mergers = weights(qwen, ("model.visual.merger.", "model.visual.deepstack_merger_list."), besides=())
    patch = model.config.vision.layer.hidden * prod(model.vision.unit_shape)
    flops = sum(product.flops for product in vision_tower(model).products(8))
    assert flops == 2 * (8 * (stored - mergers + patch) + 2 * mergers)
    per_tile = [
        sum(p.flops for p in vision_tower(open_model(checkpoint)).products(tiles)) / tiles for tiles in (1, 3)
    ]
    assert per_tile[0] == per_tile[1]


def test_products_of_pixtral_and_its_projector(tmp_path: Path) -> None:
    """A patch meets each matrix of the layers once, a row each of the projector's."""
    path = tmp_path / "model"
    write_checkpoint(path, NEMOTRON_VL)
    model = open_model(path)
    tower = weights(path, ("vision_tower.",), besides=("patch_conv.weight",))
    projector = weights(path, ("multi_modal_projector.",), besides=())
    patch = model.config.vision.layer.hidden * prod(model.vision.unit_shape)
    flops = sum(product.flops for product in vision_tower(model).products(8))
    assert flops == 2 * (8 * (tower + patch) + 2 * projector)
    stored = weights(path, ("language_model.",), besides=("embed_tokens.weight",))
    assert sum(product.flops for product in text_tower(model).products(5)) == 2 * 5 * stored


def test_products_of_a_head_over_the_vocabulary(tmp_path: Path) -> None:
    """A token meets the decoder, too, which is tied to the embeddings."""
    write_checkpoint(path := tmp_path / "model", SPLADE_TINY)
    layers = weights(path, ("bert.encoder.", "cls.predictions.transform."), besides=())
    decoder = weights(path, ("bert.embeddings.word_embeddings.",), besides=())
    flops = sum(product.flops for product in text_tower(open_model(path)).products(5))
    assert flops == 2 * 5 * (layers + decoder)


@pytest.mark.parametrize("family", ["splade", "bert_colbert", "bert_rerank"])
def test_what_is_no_vector_is_compared(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights of ids, token vectors of which some hold nothing, and scores."""
    assert engine.main(["--size", "tiny", "--family", family, "--no-rates"]) == 0
    assert "worst cosine against float32: text 1.000000" in capsys.readouterr().out


def test_scores_are_compared_as_one_vector(tmp_path: Path) -> None:
    write_checkpoint(path := tmp_path / "model", RERANK_TINY)
    model = open_model(path)
    rows = [
        Rows(np.array(scores, np.float32)[:, None], np.arange(3), np.ones(2, np.float32))
        for scores in ((3.0, 4.0), (4.0, 3.0))
    ]
    one, other = (compared(model, each) for each in rows)
    assert float((one * other).sum() / one.norm() / other.norm()) == pytest.approx(0.96)


def test_every_row_of_another_family(qwen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert engine.main(["--size", "tiny", "--model-path", str(qwen), "--seconds", "0.01"]) == 0
    assert "worst cosine against float32: text 1.000000, vision rows 1.000000" in capsys.readouterr().out
