"""Lines of an OpenAI batch: OGX's ``/v1/batches`` with the service behind it, and ``tessera embed``."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tessera.defaults import MODEL
from tests.clients.environment import clients_environment
from tests.e2e.service import free_ports
from tests.e2e.several import Several, several
from tests.waiting import wait_until

pytestmark = [pytest.mark.service, pytest.mark.installs, pytest.mark.xdist_group("retriever")]

NAME = "nvidia/llama-nemotron-embed-vl-1b-v2"
ROUTE = "/v1/embeddings"
CONFIGURATION = """\
version: 2
distro_name: tessera
apis: [batches, files, inference]
providers:
  inference:
  - provider_id: nvidia
    provider_type: remote::vllm
    config: {{base_url: {url}/v1, api_token: none}}
  files:
  - provider_id: files
    provider_type: inline::localfs
    config: {{storage_dir: {folder}/files, metadata_store: {{table_name: files, backend: sql}}}}
  batches:
  - provider_id: batches
    provider_type: inline::reference
    config: {{sqlstore: {{table_name: batches, backend: sql}}}}
storage:
  backends:
    kv: {{type: kv_sqlite, db_path: {folder}/kv.db}}
    sql: {{type: sql_sqlite, db_path: {folder}/sql.db}}
  stores:
    metadata: {{namespace: registry, backend: kv}}
    inference: {{table_name: inference, backend: sql}}
    conversations: {{table_name: conversations, backend: sql}}
    prompts: {{table_name: prompts, backend: sql}}
    connectors: {{table_name: connectors, backend: sql}}
registered_resources:
  models:
  - model_id: {name}
    provider_id: nvidia
    provider_model_id: {name}
    model_type: embedding
    metadata: {{embedding_dimension: 256}}
server: {{host: 127.0.0.1}}
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    with several(tmp_path_factory.mktemp("service"), {NAME: MODEL}) as running:
        yield running


@contextmanager
def ogx(folder: Path, service: Several) -> Iterator[openai.OpenAI]:
    """A client of an OGX server whose embeddings are the service's."""
    program = clients_environment("retriever") / "bin" / "ogx"
    (port,) = free_ports(1)
    configuration = folder / "ogx.yaml"
    configuration.write_text(CONFIGURATION.format(url=service.url, folder=folder, name=NAME))
    environment = os.environ | {"HOME": str(folder)}
    environment.pop("PYTHONPATH", None)
    log = folder / "ogx.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [program, "run", str(configuration), "--port", str(port), "--insecure"],
            env=environment,
            stdout=output,
            stderr=output,
        ) as process,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client,
    ):
        try:
            wait_until(lambda: _answers(client), process=process, said=log.read_text)
            yield client
        finally:
            process.terminate()


def _answers(client: openai.OpenAI) -> bool:
    try:
        return httpx.get(f"{client.base_url}models").is_success
    except httpx.TransportError:
        return False


def batch(client: openai.OpenAI, lines: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of a batch's output file, and of its file of errors."""
    file = client.files.create(file=("lines.jsonl", io.BytesIO(lines.encode())), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint=ROUTE, completion_window="24h")
    ends = ("completed", "failed")
    wait_until(lambda: client.batches.retrieve(made.id).status in ends)
    made = client.batches.retrieve(made.id)
    assert made.status == "completed", made
    files = [made.output_file_id or "", made.error_file_id or ""]
    output, errors = (read(client.files.content(name).text) for name in files)
    return output, errors


def read(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def vectors(line: dict[str, Any]) -> np.ndarray:
    body = line["response"]["body"]
    # OGX writes it as a text.
    data = (json.loads(body) if isinstance(body, str) else body)["data"]
    assert [row["index"] for row in data] == list(range(len(data)))
    return np.array([row["embedding"] for row in data], np.float32)


def test_a_batch_server_and_the_command_make_the_same_of_lines(service: Several, tmp_path: Path) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "one": {"input": "a yellow heart"},
        "list": {"input": ["a yellow heart", "two blue squares", "a pie chart"]},
        "list#1": {"input": "what looks like an input of another line"},
        "asked": {"input": "a yellow heart", "input_type": "query"},
        "floats": {"input": ["a bar chart"], "encoding_format": "float"},
        "long": {"input": "word " * 10_000},
    }
    lines = "".join(
        json.dumps({"custom_id": name, "method": "POST", "url": ROUTE, "body": {"model": NAME, **body}})
        + "\n"
        for name, body in bodies.items()
    )
    with ogx(tmp_path, service) as client:
        output, errors = batch(client, lines)
    assert [line["custom_id"] for line in output] == [id for id in bodies if id != "long"]
    assert [line["custom_id"] for line in errors] == ["long"] and "tokens" in errors[0]["error"]["message"]

    (tmp_path / "lines.jsonl").write_text(lines)
    out = tmp_path / "out"
    words = ["lines.jsonl", "--out", str(out), "--format", "openai", "--url", service.url]
    ran = subprocess.run(
        [sys.executable, "-m", "tessera.cli", "embed", *words],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        cwd=tmp_path,
    )
    assert ran.returncode == 3, ran.stderr
    (part,) = (out / "vectors").glob("*.jsonl")
    own = {line["custom_id"]: line for line in read(part.read_text())}
    (error,) = read((out / "errors.jsonl").read_text())
    assert error["custom_id"] == "long" and "tokens" in error["error"]["message"]
    assert list(own) == [line["custom_id"] for line in output]
    for line in output:
        assert line["response"]["status_code"] == own[line["custom_id"]]["response"]["status_code"] == 200
        np.testing.assert_allclose(vectors(own[line["custom_id"]]), vectors(line), atol=1e-5)
    heart, asked = vectors(own["one"])[0], vectors(own["asked"])[0]
    assert np.abs(heart - asked).max() > 1e-3
