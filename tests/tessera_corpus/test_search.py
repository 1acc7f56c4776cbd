"""Search over outputs, beside numpy over the same vectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tessera.errors import ConfigError
from tessera_corpus.search import Table
from tests.tessera_corpus.output.made import WIDTH, embedded, kind_of, opened


def table(folder: Path, *, dtype: str = "float32", tokens: bool = False, format: str = "parquet") -> Table:
    """Forty texts, of which id-3 and id-33 are the same."""
    output = opened(
        folder, kind=kind_of(dtype=dtype, tokens=tokens), dtype=dtype, format=format, part_rows=15
    )
    for number in range(40):
        text = f"text {3 if number == 33 else number}"
        output.put([embedded(f"id-{number}", text, rows=1 + number % 3 if tokens else 1)])
    output.close()
    return Table(folder)


@pytest.mark.parametrize("format", ["parquet", "lance"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_the_best_come_first_and_equal_contents_are_one(tmp_path: Path, dtype: str, format: str) -> None:
    found = table(tmp_path, dtype=dtype, format=format)
    query = embedded("q", "text 3").rows.values
    hits = found.search(query, 5)
    rows = np.concatenate(
        [embedded("", f"text {number}").rows.values for number in range(40) if number != 33]
    )
    cosines = (rows @ query[0]) / np.linalg.norm(rows, axis=1) / np.linalg.norm(query)
    assert [place.id for place in hits[0].places] == ["id-3", "id-33"] and len(hits) == 5
    assert np.allclose([hit.score for hit in hits], np.sort(cosines)[::-1][:5], atol=0.02)
    assert hits[0].places[0].source == "/corpus/id-3"


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_token_vectors_are_compared_each_with_its_best(tmp_path: Path, dtype: str) -> None:
    found = table(tmp_path, dtype=dtype, tokens=True)
    query = embedded("q", "text 5", rows=2).rows.values
    unit = query / np.linalg.norm(query, axis=1, keepdims=True)
    wanted = {}
    for number in range(40):
        if number != 33:
            rows = embedded("", f"text {number}", rows=1 + number % 3).rows.values
            rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
            wanted[f"id-{number}"] = float((unit @ rows.T).max(axis=1).sum())
    hits = found.search(query, 40)
    assert len(hits) == 39
    assert all(abs(hit.score - wanted[hit.places[0].id]) < 0.03 for hit in hits)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not what tessera embed writes"):
        Table(tmp_path)
    with pytest.raises(ConfigError, match=r"nowhere: no such directory$"):
        Table(tmp_path / "nowhere")
    found = table(tmp_path / "out")
    with pytest.raises(ConfigError, match=f"width {WIDTH}"):
        found.search(np.ones((1, WIDTH + 1), np.float32), 3)
    with pytest.raises(ConfigError, match=f"width {WIDTH}"):
        found.search(np.ones((2, WIDTH), np.float32), 3)
