from __future__ import annotations

import csv
from pathlib import Path

import pytest
from benchmarks.products import text_products, vision_products

from benchmarks import engine
from tessera.errors import ConfigError
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL


def test_one_table_with_every_workload(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--size",
        "tiny",
        "--model-path",
        str(checkpoint),
        "--seconds",
        "0.01",
        "--out",
        str(tmp_path),
    ]
    assert engine.main(arguments) == 0
    with (tmp_path / "engine.csv").open() as file:
        rows = list(csv.reader(file))
    assert tuple(rows[0]) == engine.HEADER
    assert {"text, 16 tokens", "1 tile + 4 tokens", "2 tiles"} <= {row[0] for row in rows}
    assert "worst cosine against float32: text 1.000000, vision rows 1.000000" in capsys.readouterr().out


def test_engines_of_an_engine_config(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "engines.yaml"
    config.write_text("vision: {max_batch_cost: 2}\ntext: {max_batch_cost: 64, max_queue_cost: 64}\n")
    arguments = ["--size", "tiny", "--model-path", str(checkpoint), "--config", str(config)]
    assert engine.main([*arguments, "--seconds", "0.01", "--no-check"]) == 0
    assert "vision, 2 tiles" in (shown := capsys.readouterr().out) and "vision, 4 tiles" not in shown
    config.write_text("vision: {engine: tensorrt, max_batch_cost: 2}\n")
    with pytest.raises(ConfigError, match="needs path"):
        engine.main([*arguments, "--seconds", "0.01"])


def test_products_count_every_weight_once(checkpoint: Path) -> None:
    """A row that goes through a stage meets each of its matrices once."""
    config = LlamaNemotronVL.open(checkpoint).config
    text = config.text
    width = (text.heads + 2 * text.kv_heads) * text.head_dim
    weights = text.layers * text.hidden * (width + text.heads * text.head_dim + 3 * text.intermediate)
    assert sum(product.flops for product in text_products(config, 5)) == 2 * 5 * weights
    per_tile = [sum(p.flops for p in vision_products(config, tiles)) / tiles for tiles in (1, 3)]
    assert per_tile[0] == per_tile[1]
