"""Hundreds of clients hang up at random moments of every route; everything is served and nothing is held."""

from __future__ import annotations

import asyncio
import gc
import random
import warnings
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from benchmarks.proc import children

from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.llama_nemotron_vl import COLEMBED_TINY
from tessera_tools.random_checkpoint.llama_rerank import TINY as RERANK_TINY
from tests.authority import Authority, needs_openssl
from tests.e2e.faults.conftest import Deployment
from tests.e2e.faults.hang_ups import Route, Target, answered, hang_ups, held, routes
from tests.e2e.service import MODEL, free_ports
from tests.e2e.serving import Serve
from tests.proc import open_files
from tests.waiting import wait_until

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("faults")]

COUNT, SECONDS = 400, 60.0
WAIT = 30.0


def descriptors(pids: Sequence[int]) -> int:
    return sum(len(open_files(pid)) for pid in pids)


def leave(
    targets: Sequence[Target], asked: Sequence[Route], pages: Sequence[str], pids: Sequence[int]
) -> None:
    """Hang up at these frontends; then each answers every route, and no process holds anything."""
    random.seed(7)
    for target in targets:
        assert answered(target, asked) == []
    before = descriptors(pids)
    seen = asyncio.run(hang_ups(targets, asked, count=COUNT, seconds=SECONDS, model=MODEL))
    print(dict(seen))
    # Who is cancelled while it connects leaves its socket to the collector, which would warn in another test.
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()
    assert seen.total() > COUNT / 4
    for target in targets:
        assert answered(target, asked) == []

    def left() -> list[object]:
        return [kept for page in pages if (kept := held(httpx.get(page, verify=False).text))]

    wait_until(lambda: not left(), WAIT, said=left)
    # Connections between the processes come and go.
    wait_until(
        lambda: descriptors(pids) <= before + 8 * len(pids), WAIT, said=lambda: (before, descriptors(pids))
    )


def quiet(log: Path, since: int) -> None:
    """Nothing of it is an error in the log."""
    text = log.read_text()[since:]
    assert "Traceback" not in text and " ERROR " not in text, text[-6000:]


def test_two_frontends_of_split_workers(deployment: Deployment) -> None:
    service = deployment.service
    since = len(service.log.read_text())
    targets = [Target(url, deployment.grpc) for url in deployment.urls]
    pages = [f"{url}/metrics" for url in deployment.urls]
    pages += [f"http://127.0.0.1:{port}/metrics" for port in service.worker_ports]
    leave(targets, routes(MODEL), pages, service.pids())
    quiet(service.log, since)


@needs_openssl
def test_one_frontend_of_three_models_over_tls(checkpoint: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "reranker", RERANK_TINY, seed=1)
    write_checkpoint(tmp_path / "tokens", COLEMBED_TINY, seed=2)
    authority = Authority(tmp_path)
    chain, key = authority.sign("server")
    (grpc_port,) = free_ports(1)
    serve = Serve(
        tmp_path,
        {"model_path": str(checkpoint), "served_model_name": MODEL},
        {"model_path": str(tmp_path / "reranker"), "served_model_name": "reranker"},
        {"model_path": str(tmp_path / "tokens"), "served_model_name": "tokens"},
        tls_cert=str(chain),
        tls_key=str(key),
        grpc_port=grpc_port,
    )
    with serve.running():
        since = len(serve.log.read_text())
        url = serve.url.replace("http:", "https:")
        target = Target(url, f"127.0.0.1:{grpc_port}", str(tmp_path / "ca.pem"))
        asked = routes(MODEL, reranker="reranker", tokens="tokens")
        first = serve.common["system_port_base"]
        pages = [f"{url}/metrics", *(f"http://127.0.0.1:{first + index}/metrics" for index in range(3))]
        leave([target], asked, pages, children(serve.process.pid))
        quiet(serve.log, since)
