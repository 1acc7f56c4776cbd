"""NVIDIA's nemo-retriever with Tessera in place of its NIMs: from a PDF to a table, a query, reranking."""

from __future__ import annotations

import base64
import io
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tessera.defaults import MODEL
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.llama_nemotron_vl import RERANK_TINY
from tests.clients.environment import clients_environment
from tests.e2e.service import ROOT
from tests.e2e.several import Several, several

pytestmark = [pytest.mark.service, pytest.mark.installs, pytest.mark.xdist_group("retriever")]

EMBEDDER = "nvidia/llama-nemotron-embed-vl-1b-v2"
RERANKER = "nvidia/llama-nemotron-rerank-vl-1b-v2"
# Whose config.json the client looks up before it asks.
COMMIT = "582e3bf72aee355e3c59ed89de53543c5b0657ee"
PICTURES = ROOT / "examples" / "images"

# The commands of docs/recipes.md, as a shell would read them: how a PDF is put in, how a query is asked.
_RECIPE = (ROOT / "docs" / "recipes.md").read_text().partition("pip install nemo-retriever\n")[2]
INGEST, QUERY = (
    shlex.split(line)[1:] for line in _RECIPE.partition("```")[0].replace("\\\n", " ").splitlines()
)


class Retriever:
    """``retriever`` and what its commands share. The hub's cache has what they look up there."""

    def __init__(self, models: Several, folder: Path) -> None:
        self.models, self.folder = models, folder
        self.python = clients_environment("retriever") / "bin" / "python"
        hub = folder / "hub" / "hub" / f"models--{EMBEDDER.replace('/', '--')}" / "snapshots" / COMMIT
        hub.mkdir(parents=True)
        for path in MODEL.glob("*.json"):
            shutil.copy(path, hub)

    def run(self, *words: str) -> str:
        quiet = {"HF_HOME": str(self.folder / "hub"), "HF_HUB_OFFLINE": "1", "NVIDIA_TELEMETRY_ENABLED": "0"}
        left_out = ("PYTHONPATH", "NVIDIA_API_KEY", "NGC_API_KEY")
        ran = subprocess.run(
            [str(self.python), *words],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name not in left_out} | quiet,
        )
        assert ran.returncode == 0, ran.stdout[-1000:] + ran.stderr[-3000:]
        return ran.stdout

    def command(self, words: Sequence[str], argument: str, *more: str) -> str:
        """One of the recipe's with another argument and further words, and with a table for all commands."""
        command, _, *flags = (word.replace("http://127.0.0.1:8000", self.models.url) for word in words)
        program = str(self.python.with_name("retriever"))
        return self.run(
            program, command, argument, *flags, "--lancedb-uri", str(self.folder / "lance"), *more
        )

    def query(self, text: str, *words: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.command(QUERY, text, "--top-k", "3", *words))
        return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    """The demonstration model, which knows what is drawn, and a reranker of random weights."""
    folder = tmp_path_factory.mktemp("retriever")
    write_checkpoint(folder / "reranker", RERANK_TINY, seed=0)
    with several(folder, {EMBEDDER: MODEL, RERANKER: folder / "reranker"}) as running:
        yield running


@pytest.fixture(scope="module")
def retriever(models: Several, tmp_path_factory: pytest.TempPathFactory) -> Retriever:
    return Retriever(models, tmp_path_factory.mktemp("retriever"))


def captions() -> dict[str, str]:
    """Of the pictures that are the pages."""
    found = json.loads((PICTURES / "captions.json").read_text())
    return {name: text for name, text in sorted(found.items()) if name.startswith(("chart", "pair"))}


def test_a_query_finds_the_page_of_a_pdf(retriever: Retriever, models: Several) -> None:
    names = list(captions())
    pages = [Image.open(PICTURES / name).convert("RGB") for name in names]
    pdf = retriever.folder / "scenes.pdf"
    pages[0].save(pdf, save_all=True, append_images=pages[1:])
    said = retriever.command(INGEST, str(pdf))
    assert f"{len(names)} row(s)" in said
    # The query whose page stands out most by the service's own vectors.
    texts = list(captions().values())
    answer = models.post("/v1/embeddings", model=EMBEDDER, input=texts, input_type="query")
    asked = np.array([row["embedding"] for row in answer.json()["data"]])
    images = [[{"type": "image_url", "image_url": {"url": _url(page)}}] for page in pages]
    answer = models.post("/v1/embeddings", model=EMBEDDER, input=images, input_type="passage")
    held = np.array([row["embedding"] for row in answer.json()["data"]])
    scores = asked @ held.T
    lead = scores.diagonal() - np.where(np.eye(len(names)), -2, scores).max(axis=1)
    best = int(lead.argmax())
    assert lead[best] > 0.05
    hits = retriever.query(texts[best])
    assert [hit["source"] for hit in hits] == [str(pdf)] * 3
    # A page that is drawn by a PDF's renderer is not that picture byte for byte.
    assert hits[0]["page_number"] == best + 1


def _url(page: Image.Image) -> str:
    buffer = io.BytesIO()
    page.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def test_texts_are_ranked_by_the_reranker_of_the_same_endpoint(retriever: Retriever, models: Several) -> None:
    texts = ["Yeast makes dough rise.", "A harbour is for ships.", "A sonnet has fourteen lines."]
    folder = retriever.folder / "texts"
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    retriever.command(INGEST, str(folder), "--extract-text", "--embed-modality", "text", "--overwrite")
    rerank = ("--rerank", "--reranker-invoke-url", f"{models.url}/v1/ranking")
    hits = retriever.query("Why does bread rise?", *rerank, "--reranker-model-name", RERANKER)
    passages = [{"text": text} for text in texts]
    answer = models.post(
        "/v1/ranking", model=RERANKER, query={"text": "Why does bread rise?"}, passages=passages
    )
    assert [hit["text"].strip() for hit in hits] == [texts[row["index"]] for row in answer.json()["rankings"]]


def test_as_many_requests_at_once_as_it_sends(retriever: Retriever, models: Several) -> None:
    said = retriever.run("-m", "tests.clients.retriever_load", f"{models.url}/v1", EMBEDDER)
    found = json.loads(said.splitlines()[-1])
    assert found["vectors"] == 32 * 128 and found["said"] == [] and 0 not in found["widths"]
    assert len(found["widths"]) == 1
    lines = httpx.get(f"{models.url}/metrics").text.splitlines()
    errors = [line for line in lines if line.startswith("tessera_errors_total") and not line.endswith(" 0.0")]
    assert errors == []
