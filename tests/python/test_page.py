"""The blocks of docs/python.md as they stand there, one after another in a program without a main guard."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from inspect import signature
from pathlib import Path

import pytest

from tessera import Embedder
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.encoder import M3_TINY
from tessera_tools.random_checkpoint.llama_nemotron_vl import RERANK_TINY, TINY
from tessera_tools.random_checkpoint.qwen3 import COL_TINY
from tests.e2e.service import ROOT

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("python")]

PAGE = (ROOT / "docs" / "python.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory in which the names of the page's models are those of checkpoints."""
    wide = replace(TINY, hidden=1024, heads=16, kv_heads=4, head_dim=64, dimensions=(512,))
    write_checkpoint(tmp_path / "nvidia" / "llama-nemotron-embed-vl-1b-v2", wide, seed=0)
    write_checkpoint(tmp_path / "nvidia" / "llama-nemotron-rerank-vl-1b-v2", RERANK_TINY, seed=0)
    write_checkpoint(tmp_path / "BAAI" / "bge-m3", M3_TINY, seed=0)
    write_checkpoint(tmp_path / "TomoroAI" / "tomoro-colqwen3-embed-4b", COL_TINY, seed=0)
    (tmp_path / "pages").mkdir()
    for name in ("chart-02", "page-03"):
        shutil.copy(ROOT / "examples" / "images" / f"{name}.jpg", tmp_path / "pages")
    return tmp_path


def test_the_page_prints_what_it_says(folder: Path) -> None:
    program = folder / "program.py"
    program.write_text("".join(BLOCKS))
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    lines = ran.stdout.splitlines()
    assert lines[0] == "(2, 1024) float32" and lines[1] in ("[0]", "[1]")
    assert lines[2:5] == ["(5, 1024)", "(1, 512) 1024 (512,)", "2 True"]
    indices, scores = zip(*(line.split() for line in lines[7:10]), strict=True)
    assert sorted(indices) == ["0", "1", "2"]
    assert [*scores] == sorted(scores, key=float, reverse=True) and all(0 < float(s) < 1 for s in scores)
    assert lines[5:7] == ["['dense', 'sparse', 'multivector'] True", "True"]
    assert lines[10:] == ["[0, 1, 2]", "2 of 2", "True", "unsupported_media input[1]"]
    assert len(BLOCKS) == 8


def test_every_argument_is_on_the_page() -> None:
    for function in (Embedder, Embedder.embed, Embedder.rerank):
        keywords = [p.name for p in signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        assert [name for name in keywords if f"`{name}=" not in PAGE] == []
