"""``tessera embed --outputs``: columns of one pass, by engines of the command and by a service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from benchmarks.service import Deployment, service

from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.encoder import M3_TINY
from tests.references.m3 import M3Reference
from tests.tessera_corpus.test_embed import embed, search

pytestmark = [pytest.mark.embeds, pytest.mark.xdist_group("corpus"), pytest.mark.usefixtures("forks")]

TEXTS = ["the river under the bridge", "a market by the old temple", "été naïve 東京 the the"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("m3") / "checkpoint"
    write_checkpoint(path, M3_TINY, seed=7)
    return path


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lines") / "texts.jsonl"
    path.write_text(
        "".join(json.dumps({"id": f"{at}", "text": text}) + "\n" for at, text in enumerate(TEXTS))
    )
    return path


@pytest.fixture(scope="module")
def url(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with service(Deployment(model_path=path, engine={}), tmp_path_factory.mktemp("logs")) as urls:
        yield urls[0]


def check(out: Path, path: Path, names: set[str]) -> None:
    """Compare a table with the definitions."""
    reference = M3Reference(path)
    rows: list[dict[str, Any]] = [
        row for part in (out / "vectors").glob("*.parquet") for row in pq.read_table(part).to_pylist()
    ]
    assert sorted(row["id"] for row in rows) == ["0", "1", "2"]
    for row in rows:
        assert row.keys() & {"vector", "dense", "sparse", "multivector"} == names
        tokens = reference.tokens(TEXTS[int(row["id"])])
        if "vector" in names:
            np.testing.assert_allclose(row["vector"], reference.dense(tokens), atol=1e-5)
        if "sparse" in names:
            weights = reference.weights(tokens)
            assert row["sparse"]["indices"] == list(weights)
            np.testing.assert_allclose(row["sparse"]["values"], list(weights.values()), atol=1e-5)
        if "multivector" in names:
            np.testing.assert_allclose(row["multivector"], reference.vectors(tokens), atol=1e-5)


def test_an_engine_makes_a_column_for_each_output(path: Path, lines: Path, tmp_path: Path) -> None:
    words: list[str | Path] = [lines, "--model", path, "--input-type", "none", "--out", tmp_path / "out"]
    three = ["--outputs", "sparse,dense,multivector"]
    assert "3 items embedded" in embed(*words, *three).stdout
    check(tmp_path / "out", path, {"vector", "sparse", "multivector"})
    # The order of the names makes no other table.
    assert "3 done before" in embed(*words, "--outputs", "dense, multivector,sparse").stdout
    refused = embed(*words, status=1).stderr
    assert "columns vector, not vector, sparse, multivector" in refused and "--replace" in refused
    (hit, _) = search(tmp_path / "out", TEXTS[1], "--model", path, "--top", "1").stdout.splitlines()
    assert hit.split()[2] == "1"


def test_an_output_that_the_model_does_not_have_is_refused_by_name(
    path: Path, lines: Path, url: str, tmp_path: Path
) -> None:
    for where in (["--model", path], ["--url", url]):
        said = embed(lines, "--out", tmp_path / "out", *where, "--outputs", "dense,colbert", status=1).stderr
        assert "has no output 'colbert'; it has dense, sparse, multivector" in said
    assert not (tmp_path / "out").exists()


def test_a_service_makes_the_same_columns(path: Path, lines: Path, url: str, tmp_path: Path) -> None:
    # What a service refuses of one line must not reach the others.
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "texts.jsonl").write_text(
        lines.read_text() + json.dumps({"id": "3", "text": "a " * 9000}) + "\n"
    )
    words: list[str | Path] = [folder / "texts.jsonl", "--url", url, "--input-type", "none"]
    for number, names in enumerate(("dense,sparse,multivector", "sparse")):
        out = tmp_path / f"{number}"
        said = embed(*words, "--out", out, "--outputs", names, status=3).stdout
        assert "3 items embedded" in said and "1 failed" in said and "what failed: 3: " in said
        wanted = {"vector" if name == "dense" else name for name in names.split(",")}
        check(out, path, wanted)
    said = search(tmp_path / "1", "a", "--url", url, status=1).stderr
    assert "holds no vectors to compare, only sparse" in said
