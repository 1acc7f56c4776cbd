from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks import peer


@pytest.mark.service
def test_stands_beside_transformers_on_the_same_inputs(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--model-path", str(checkpoint), "--clients", "1", "--warm", "0.2", "--seconds", "1"]
    arguments += ["--threads", "1", "--tokens", "1024", "--units", "2", "--batch", "2"]
    arguments += ["--workloads", "text-32@2", "tile@1", "page@1", "--out", str(tmp_path)]
    assert peer.main(arguments) == 0
    with (tmp_path / "peer.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["workload"] for row in rows] == ["text-32", "tile", "page"]
    assert float(rows[0]["ratio"]) > 0
    for row in rows:
        assert float(row["worst cosine"]) > 0.9999


def test_a_peer_that_is_not_installed_is_named(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ["--peer", "vllm", "--model-path", str(checkpoint), "--clients", "1", "--warm", "0"]
    arguments += ["--seconds", "0.1", "--tokens", "1024", "--workloads", "text-32@1", "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="vLLM is not installed"):
        peer.main(arguments)
