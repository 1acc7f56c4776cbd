"""Models that are added by SIGHUP while discovery is away, and over NATS, where none can be."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.faults.stores import Etcd, Nats
from tests.e2e.serving import Serve
from tests.e2e.several import listing, several
from tests.waiting import wait_for_line

pytestmark = [pytest.mark.several, pytest.mark.xdist_group("several")]

BODY = {"input": "a yellow heart"}


def test_a_model_that_is_added_while_etcd_is_away_is_served_in_the_end(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    etcd = Etcd(tmp_path)
    monkeypatch.setenv("ETCD_ENDPOINTS", etcd.url)
    monkeypatch.setenv("ETCD_LEASE_TTL", "60")
    try:
        with several(tmp_path, {"one": checkpoint}, rpc=("--discovery-backend", "etcd")) as running:
            running.start_worker("two", checkpoint)
            one, two = (listing(name, checkpoint, slot) for slot, name in enumerate(("one", "two")))
            etcd.stop()
            running.serve(one, two)
            running.wait("one")
            told = "cannot be opened now, and will be tried again: "
            wait_for_line(running.log, "two cannot be opened now")
            assert running.health("two")["status"].startswith(told)
            refused = running.post("/v1/embeddings", model="two", **BODY)
            assert refused.status_code == 503 and told in refused.json()["error"]["message"]
            assert running.post("/v1/embeddings", model="one", **BODY).status_code == 200
            etcd.start()
            # Nobody tells the frontend again.
            running.wait("two")
            assert running.post("/v1/embeddings", model="two", **BODY).status_code == 200
            # Later ones are heard, too.
            running.serve(two)
            running.wait("one", status=None)
    finally:
        etcd.stop()


@contextmanager
def asked(url: str, model: str) -> Iterator[list[int]]:
    """Four clients that ask a model without a pause; the statuses of its answers."""
    statuses: list[int] = []
    done = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            while not done.is_set():
                answer = client.post("/v1/embeddings", json={"model": model, **BODY})
                statuses.append(answer.status_code)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_frontends_of_several_models_start_and_serve_over_nats(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers of the first model answer while the others are opened, and clients ask meanwhile."""
    nats = Nats(tmp_path)
    monkeypatch.setenv("NATS_SERVER", nats.url)
    rpc = ("--discovery-backend", "file", "--request-plane", "nats")
    models = dict.fromkeys(("one", "two", "three"), checkpoint)
    try:
        with several(tmp_path, models, rpc=rpc) as running, asked(running.url, "one") as statuses:
            listed = [listing(name, checkpoint, slot) for slot, name in enumerate(models)]
            # A new one is refused by name, and the rest goes on.
            running.serve(*listed, listing("four", checkpoint, 3))
            wait_for_line(running.log, "four cannot be opened")
            said = running.health("four")["status"]
            assert said.startswith("cannot be opened: ") and "over NATS" in said
            # One that was there at the start comes and goes.
            running.serve(*listed[:2])
            running.wait("three", status=None)
            running.serve(*listed)
            running.wait("three")
            for name in models:
                assert running.post("/v1/embeddings", model=name, **BODY).status_code == 200
        assert len(statuses) > 10 and set(statuses) == {200}
    finally:
        nats.stop()


def test_a_launcher_refuses_to_add_a_model_over_nats(checkpoint: Path, tmp_path: Path) -> None:
    nats = Nats(tmp_path)
    one = {"model": str(checkpoint), "served_model_name": "one"}
    two = {"model": str(checkpoint), "served_model_name": "two"}
    serve = Serve(tmp_path, one, frontends=1, request_plane="nats")
    try:
        with serve.running({**os.environ, "NATS_SERVER": nats.url}):
            before = serve.worker("tessera-one")
            serve.write(one, two)
            serve.reload("over NATS a model is added by a restart: two; the models stay as they are")
            assert serve.ask("one").status_code == 200
            assert serve.worker("tessera-one") == before and serve.worker("tessera-two") == []
            # Another SIGHUP, with what is served.
            serve.write(one)
            serve.reload("no model was added, taken away or changed")
            assert serve.process.poll() is None
    finally:
        nats.stop()
