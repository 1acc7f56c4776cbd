"""Every block and every row of ``docs/migrate.md``, against a running service."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import requests
from docs.tables import rows_of

from tessera.cli.serve import read
from tessera.frontend.api.openai import EMBEDDINGS
from tessera.frontend.settings import FrontendSettings
from tessera.launch.settings import settings
from tessera.worker.settings import StageSettings, WorkerSettings
from tests.clients.conftest import ClosedService
from tests.e2e.inputs import cosine, data_url
from tests.e2e.service import MODEL
from tests.references.llama_nemotron_vl import Reference

PAGE = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", PAGE, re.MULTILINE))

Floats = npt.NDArray[np.float32]
WANTED = {
    "vLLM": [("a red flower", True, "passage")],
    "NVIDIA NIM": [
        ("a meadow", False, "passage"),
        (None, True, "passage"),
        ("a red flower", True, "passage"),
    ],
    "Text-Embeddings-Inference": [
        *(("a red flower", False, "query"), ("a meadow", False, "none"), ("a river", False, "none")),
    ],
    "Infinity": [(None, True, "passage")],
    "sentence-transformers": [("a red flower", False, "query")],
    "Jina": [("a red flower", False, "query")],
    "Cohere": [("a red flower", True, "passage")],
    "Voyage": [("a red flower", True, "passage"), ("a red flower", False, "query")],
}
"""What the request of each section embeds: text, whether with the picture, and the role."""


@dataclass(frozen=True, slots=True)
class Row:
    """A request of a table of differences, and what it gives: a status, or how it compares with another."""

    method: str
    path: str
    body: str
    relation: str
    other: str

    def __str__(self) -> str:
        return f"{self.path} {self.body} {self.relation} {self.other}"


def rows(section: str) -> Iterator[Row]:
    path = re.findall(r"^`POST (\S+)`$", section, re.MULTILINE)
    for line in section.partition(" | Tessera | example |\n|---|---|---|\n")[2].splitlines():
        if not line.startswith("| "):
            return
        cell = line.removesuffix(" |").rpartition("| ")[2]
        found = re.fullmatch(r"(?:`(?:(GET) )?(/\S+)` ?)?(?:`({.*?})`)? (?:(\d{3})|([=≠]) `({.*})`)", cell)
        assert found is not None, cell
        method, own, body, status, relation, other = found.groups()
        yield Row(method or "POST", own or path[0], body or "", relation or status, other or "")


TRITON = "Triton"
"""The section whose client sends tensors, which tests of its own try (``tests/e2e/test_kserve``)."""
RERANKERS = "Rerankers"
"""The section about another kind of model: a service of its own."""
ROWS = [row for name, section in SECTIONS.items() if name != RERANKERS for row in rows(section)]
RERANKER_ROWS = list(rows(SECTIONS[RERANKERS]))


def blocks(section: str) -> list[str]:
    return re.findall(r"^```diff\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def version(block: str, sign: str) -> str:
    """A block with the lines of before, ``-``, or after, ``+``."""
    return "".join(f"{line[1:]}\n" for line in block.splitlines() if line[:1] in (sign, " ", ""))


REQUESTS = [
    (name, block)
    for name, section in SECTIONS.items()
    for block in blocks(section)
    if "import" in block or "curl" in block
]
RERANKER_REQUESTS = [block for name, block in REQUESTS if name == RERANKERS]
TRITON_REQUESTS = [block for name, block in REQUESTS if name == TRITON]
REQUESTS = [(name, block) for name, block in REQUESTS if name not in (RERANKERS, TRITON)]


def test_every_section_has_a_command_a_request_and_differences() -> None:
    assert SECTIONS.keys() == {"What holds here, whoever asks", *WANTED, TRITON, RERANKERS}
    for name in WANTED:
        commands = [block for block in blocks(SECTIONS[name]) if "+tessera serve " in block]
        assert len(commands) == 1, name
        assert any(found == name for found, _ in REQUESTS), name
        assert len(list(rows(SECTIONS[name]))) >= 8, name
    assert len(ROWS) > 80


@pytest.mark.parametrize("name", [*WANTED, TRITON, RERANKERS])
def test_the_command_is_one_that_can_be_typed(name: str) -> None:
    (command,) = [block for block in blocks(SECTIONS[name]) if "+tessera serve " in block]
    asked = read(version(command, "+").split()[2:])
    assert asked.given["model_path"].text.count("/") == 1


@pytest.mark.parametrize("name", [*WANTED, TRITON])
def test_options_that_are_named_exist(name: str) -> None:
    known = {"HF_TOKEN", "HF_HOME", "TESSERA_API_KEYS", "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT"}
    known |= {"/v1", "prompt_name"} | EMBEDDINGS.names | {each.setting.flag for each in settings()}
    for kind in (FrontendSettings, WorkerSettings, StageSettings):
        known |= {option for row in rows_of(kind) for option in row.names}
    table = SECTIONS[name].partition(" | Tessera |\n|---|---|\n")[2].partition("\n\n")[0]
    assert table or name in ("Jina", "Cohere", "Voyage")  # Hosted: nobody starts them.
    for line in table.splitlines():
        here = line.split(" | ")[1]
        assert set(re.findall(r"`([^`]+)`", here)) <= known, here
        assert "`" in here or here.startswith("none")


def served_at(name: str) -> str:
    """Return the host and port where the command of a section serves."""
    (command,) = [block for block in blocks(SECTIONS[name]) if "+tessera serve " in block]
    given = read(version(command, "+").split()[2:]).given
    return f"127.0.0.1:{given['dyn_http_port'].text if 'dyn_http_port' in given else 8000}"


def at_the_service(text: str, name: str, url: str) -> str:
    """Replace the address where a section's command serves; the page may print no other port of this host."""
    served = served_at(name)
    assert set(re.findall(r"127\.0\.0\.1:\d+", text)) <= {served}, (
        f"{name} asks where nothing serves:\n{text}"
    )
    return text.replace(served, url.removeprefix("http://"))


@pytest.mark.parametrize(
    ("name", "port"), [("Text-Embeddings-Inference", 8080), ("Infinity", 7997), ("Jina", 8000)]
)
def test_a_request_to_a_port_that_is_not_served_fails(name: str, port: int) -> None:
    assert served_at(name) == f"127.0.0.1:{port}"
    with pytest.raises(AssertionError, match="asks where nothing serves"):
        at_the_service("http://127.0.0.1:8001", name, "http://127.0.0.1:1")


@pytest.mark.parametrize("name", [*WANTED, TRITON, RERANKERS])
def test_requests_go_to_the_port_that_is_served(name: str) -> None:
    requests_of = [version(block, "+") for block in blocks(SECTIONS[name]) if "127.0.0.1" in block]
    assert requests_of
    for block in requests_of:
        assert served_at(name) in block and at_the_service(block, name, "http://other:1").count("other:1")


class Asked:
    """The service, with what the page writes in place of what only the test knows."""

    def __init__(self, service: ClosedService, http: httpx.Client, picture: bytes) -> None:
        self.service, self.http, self.picture = service, http, data_url(picture)

    def block(self, name: str, block: str) -> str:
        """Return a block after the change, with the address of this service."""
        return self.own(at_the_service(version(block, "+"), name, self.service.url))

    def own(self, text: str) -> str:
        """The page's names, keys and widths as this service has them."""
        text = re.sub(
            r"(?:nvidia/llama-nemotron-(?:embed-vl|rerank)-1b-v2|Qwen/Qwen3-VL-Embedding-2B"
            r"|sentence-transformers/all-MiniLM-L6-v2)\b",
            MODEL,
            text,
        )
        text = text.replace('"dimensions": 512', '"dimensions": 64')
        text = text.replace("NVIDIA/llama-nemotron-embed-vl-1b-V2", MODEL.upper())
        for key in ('="none"', "Bearer none"):
            text = text.replace(key, key.replace("none", self.service.key))
        return text

    def body(self, text: str) -> Any:
        text = self.own(text).replace('["a", …]', json.dumps(["a"] * 9000))
        text = text.replace("data:image/jpeg;base64,…", self.picture).replace("word …", "word " * 20_000)
        assert "…" not in text
        return json.loads(text)

    def answer(self, method: str, path: str, body: str) -> httpx.Response:
        return self.http.request(method, path, json=self.body(body) if body else None)

    def vectors(self, path: str, body: str) -> Floats:
        answer = self.answer("POST", path, body)
        assert answer.status_code == 200, answer.text
        return vectors_of(answer.json())


def scores_of(answer: Any) -> list[tuple[int, float]]:
    """The index and the score of each document, in the order of an answer of any client's shape."""
    if isinstance(answer, dict):
        answer = answer.get("results") or answer.get("rankings") or answer["data"]
    names = ("relevance_score", "logit", "score")
    return [(row["index"], next(row[name] for name in names if name in row)) for row in answer]


def vectors_of(answer: Any) -> Floats:
    """The vectors of an answer of OpenAI's, Voyage's, Cohere's or TEI's shape."""
    if isinstance(answer, dict):
        answer = (
            [row["embedding"] for row in answer["data"]]
            if "data" in answer
            else answer["embeddings"]["float"]
        )
    return np.array(answer, np.float32)


@pytest.fixture
def asked(service: ClosedService, http: httpx.Client, photos: dict[str, bytes]) -> Asked:
    return Asked(service, http, photos["flower"])


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_row_says_what_happens(row: Row, asked: Asked) -> None:
    if row.relation.isdigit():
        answer = asked.answer(row.method, row.path, row.body)
        assert answer.status_code == int(row.relation), answer.text
        return
    one, other = asked.vectors(row.path, row.body), asked.vectors(row.path, row.other)
    assert one.shape == other.shape
    assert np.allclose(one, other, atol=1e-4 * float(np.linalg.norm(one))) == (row.relation == "=")


def test_a_request_of_tritons_client(service: ClosedService) -> None:
    (block,) = TRITON_REQUESTS
    code = at_the_service(version(block, "+"), TRITON, service.url)
    # The page's service has no keys.
    headers = f'headers={{"authorization": "Bearer {service.key}"}}'
    found: dict[str, Any] = {}
    exec(code.replace("[ids, mask])", f"[ids, mask], {headers})"), found)
    assert np.allclose(np.linalg.norm(found["vectors"], axis=1), 1, atol=1e-5)
    assert len(found["vectors"]) == 2


@pytest.fixture
def reranked(reranker: ClosedService, photos: dict[str, bytes]) -> Iterator[Asked]:
    with reranker.http() as http:
        yield Asked(reranker, http, photos["flower"])


@pytest.mark.parametrize("row", RERANKER_ROWS, ids=str)
def test_a_row_about_rerankers_says_what_happens(row: Row, reranked: Asked) -> None:
    answer = reranked.answer(row.method, row.path, row.body)
    if row.relation.isdigit():
        assert answer.status_code == int(row.relation), answer.text
        return
    one, other = (scores_of(each.json()) for each in (answer, reranked.answer("POST", row.path, row.other)))
    assert row.relation == "="
    assert [index for index, _ in one] == [index for index, _ in other]
    assert [score for _, score in one] == pytest.approx([score for _, score in other], abs=1e-4)


@pytest.mark.parametrize(
    "block", RERANKER_REQUESTS, ids=[block.splitlines()[0][:40] for block in RERANKER_REQUESTS]
)
def test_a_request_gives_the_rerankers_scores(
    block: str, reranked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = reranked.block(RERANKERS, block)
    if "import" in block:
        compile(version(block, "-"), "before", "exec")
        found = run(after, monkeypatch)["scores"]
    else:
        found = scores_of(json.loads(subprocess.check_output(after, shell=True, executable="/bin/bash")))
    raw = {"text_1": "a red flower", "text_2": ["a meadow", "a red rose"], "use_activation": False}
    logits = dict(scores_of(reranked.http.post("/score", json=raw).json()))
    # As each of them is asked for: NIM knows no other, Infinity's request says so.
    probable = not ("/v1/ranking" in block or "raw_scores" in block)
    wanted = [1 / (1 + np.exp(-logit)) if probable else logit for logit in logits.values()]
    assert dict(found) == pytest.approx(dict(enumerate(wanted)), abs=1e-4)
    if "/score" not in block:
        assert list(found) == sorted(found, key=lambda row: -row[1])


def run(source: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that a program of the page leaves."""
    # Here: every process that collects the tests beside this would import three clients for nothing.
    from cohere import ClientV2
    from openai import OpenAI
    from voyageai.api_resources.api_requestor import _thread_context

    names: dict[str, Any] = {}
    with requests.Session() as session:
        # voyageai keeps its connection in the thread and closes it only when it is old.
        monkeypatch.setattr(_thread_context, "session", session, raising=False)
        monkeypatch.setattr(_thread_context, "session_create_time", time.time(), raising=False)
        exec(compile(source, "after", "exec"), names)
    client = names["client"]
    if isinstance(client, OpenAI):
        client.close()
    elif isinstance(client, ClientV2):
        client._client_wrapper.httpx_client.httpx_client.close()
    return names


@pytest.mark.parametrize(("name", "block"), REQUESTS, ids=[name for name, _ in REQUESTS])
def test_a_request_gives_the_models_vectors(
    name: str,
    block: str,
    asked: Asked,
    reference: Reference,
    photos: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "photo.jpg").write_bytes(photos["flower"])
    monkeypatch.chdir(tmp_path)
    after = asked.block(name, block)
    if "import" in block:
        compile(version(block, "-"), "before", "exec")
        names = run(after, monkeypatch)
        found = np.array(names["vectors"], np.float32)
    else:
        found = vectors_of(json.loads(subprocess.check_output(after, shell=True, executable="/bin/bash")))
    wanted = [
        reference.vector(text, [photos["flower"]] if picture else [], role)
        for text, picture, role in WANTED[name]
    ]
    if name == "Text-Embeddings-Inference" and "curl" in block:
        wanted = wanted[1:2]
    assert len(found) == len(wanted)
    for vector, expected in zip(found, wanted, strict=True):
        assert cosine(vector, expected) >= 0.9999
