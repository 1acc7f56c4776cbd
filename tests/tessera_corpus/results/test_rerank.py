"""``tessera search --rerank`` with an embedder and a reranker on one endpoint."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest

from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.llama_nemotron_vl import RERANK_TINY
from tests.e2e.several import several
from tests.tessera_corpus.results.test_command import Command

pytestmark = [
    pytest.mark.service,
    pytest.mark.several,
    pytest.mark.xdist_group("several"),
    pytest.mark.usefixtures("forks"),
]


def test_results_come_in_the_order_of_the_reranker(
    checkpoint: Path, photos: dict[str, bytes], tmp_path: Path
) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, data in photos.items():
        (folder / f"{name}.jpg").write_bytes(data)
    (folder / "note.txt").write_text("a note of a flower")
    (folder / "gone.txt").write_text("another note")
    write_checkpoint(tmp_path / "reranker", RERANK_TINY, seed=3)
    # The reranker stands first, and the embedder is found all the same.
    with several(tmp_path, {"reranker": tmp_path / "reranker", "pictures": checkpoint}) as models:
        tessera = Command(tmp_path, models.url, "")
        tessera.run("embed", "pictures", "--out", "vectors", "--url", models.url, "--progress", "none")
        (folder / "gone.txt").unlink()
        documents: list[object] = [
            {"image": "data:image/jpeg;base64," + base64.b64encode(data).decode()} for data in photos.values()
        ]
        names = [*(f"{name}.jpg" for name in photos), "note.txt"]
        body = {"model": "reranker", "query": "a flower", "documents": [*documents, "a note of a flower"]}
        results = models.post("/v1/rerank", **body).json()["results"]
        for words in (["--rerank"], ["--rerank", "reranker"]):
            process = tessera.start("search", "vectors", "a flower", "--url", models.url, *words)
            said, errors = process.communicate(timeout=180)
            assert process.returncode == 0, errors
            assert "1 left out: not there any more" in errors
            found = re.findall(r"^ +\d+\. +(-?[\d.]+)  (\S+)$", said, re.MULTILINE)
            assert [name for _, name in found] == [names[result["index"]] for result in results]
            assert [float(score) for score, _ in found] == pytest.approx(
                [result["relevance_score"] for result in results], abs=1e-3
            )
        both = tessera.search("a flower", "--image", folder / "flower.jpg", "--rerank", "--html", "both.html")
        assert "1." in both and "reranked" in (tmp_path / "both.html").read_text()
        assert "not" in tessera.search("a flower", "--rerank", "nobody", status=1)
