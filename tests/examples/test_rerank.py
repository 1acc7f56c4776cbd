"""``examples/search.py query --rerank`` against an embedder and a reranker on one endpoint."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.tools.random_checkpoint.checkpoint import write_checkpoint
from tessera.tools.random_checkpoint.llama_nemotron_vl import RERANK_TINY
from tests.e2e.service import ROOT
from tests.e2e.several import several

pytestmark = [pytest.mark.service, pytest.mark.several, pytest.mark.xdist_group("several")]


def test_pictures_come_in_the_order_of_the_reranker(
    checkpoint: Path, photos: dict[str, bytes], tmp_path: Path
) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, data in photos.items():
        (folder / f"{name}.jpg").write_bytes(data)
    write_checkpoint(tmp_path / "reranker", RERANK_TINY, seed=3)

    def run(url: str, *words: str | Path) -> str:
        ran = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "search.py"), *map(str, words)],
            cwd=tmp_path,
            env=os.environ | {"TESSERA_URL": url},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    # The reranker stands first, and the embedder is found all the same.
    with several(tmp_path, {"reranker": tmp_path / "reranker", "pictures": checkpoint}) as models:
        run(models.url, "index", folder)
        images = [
            {"image": "data:image/jpeg;base64," + base64.b64encode(data).decode()} for data in photos.values()
        ]
        body = {"model": "reranker", "query": "a flower", "documents": images}
        results = models.post("/v1/rerank", **body).json()["results"]
        names = [f"{list(photos)[result['index']]}.jpg" for result in results]
        for words in (["--rerank"], ["--rerank", "reranker"]):
            said = run(models.url, "query", folder, "a flower", *words)
            found = re.findall(r"^ +\d+\. +(-?[\d.]+)  \S*?(\w+\.jpg)$", said, re.MULTILINE)
            assert [name for _, name in found] == names
            assert [float(score) for score, _ in found] == pytest.approx(
                [result["relevance_score"] for result in results], abs=1e-3
            )
        both = run(models.url, "query", folder, "a flower", "--image", folder / "flower.jpg", "--rerank")
        assert "1." in both
