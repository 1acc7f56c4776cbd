"""``tessera serve`` with several models in its file, and what SIGHUP does to them while one is asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import yaml
from benchmarks.proc import children

from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.llama_nemotron_vl import TINY
from tests.checkpoint.local_hub import COMMIT, REPOSITORY, files_of, local_hub
from tests.e2e.serving import Serve, client
from tests.proc import command_line, environment

pytestmark = [pytest.mark.operates, pytest.mark.xdist_group("several")]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random checkpoints whose vectors differ."""
    folder = tmp_path_factory.mktemp("reload")
    found = {name: folder / name for name in ("one", "two", "other")}
    for seed, path in enumerate(found.values()):
        write_checkpoint(path, TINY, seed=seed)
    return found


def test_models_come_and_go_and_change_while_another_one_answers(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    one, two = {"model": str(checkpoints["one"])}, {"model": str(checkpoints["two"])}
    split = {**two, "encode_workers": 1, "embed_workers": 1}
    serve = Serve(tmp_path, one, two, frontends=2)
    with serve.running(), client(serve, "one"):
        assert serve.vector("one") != (of_two := serve.vector("two"))
        (first,), (second,) = serve.worker("tessera-one"), serve.worker("tessera-two")
        said = serve.log.read_text()
        assert "agg worker 0 of one" in said and "in all" in said and "models one, two" in said

        # A worker that is killed is missed by its own model alone.
        os.kill(second, signal.SIGKILL)
        serve.wait_for(f"agg worker 0 of two (pid {second}) ended with status 137")
        serve.wait(lambda: serve.ask("two").status_code == 200)
        assert serve.worker("tessera-one") == [first]

        # Added, with names of its own.
        three = {"model": str(checkpoints["other"]), "served_model_name": ["three", "drei"]}
        serve.write(one, two, three)
        serve.reload("tessera: ready: three")
        of_three = serve.vector("Drei")
        assert of_three != of_two and list(serve.models()) == ["one", "two", "three"]

        # Changed: another shape, another checkpoint under the name of before.
        serve.write(one, split, {**three, "model": str(checkpoints["two"])})
        with client(serve, "two", 503):
            serve.reload("tessera: ready: two, three")
        assert serve.vector("two") == serve.vector("three") == pytest.approx(of_two, abs=1e-5)
        # The other frontend may learn of a worker later.
        serve.wait(lambda: serve.models()["two"]["workers"] == {"embed": 1, "encode": 1})

        # Another name, and another width: frontends alone have to do with that.
        workers = serve.worker("tessera-two")
        serve.write(
            one,
            {**split, "served_model_name": ["two", "zwei"], "dimensions_allowed": "8-16"},
            {**three, "model": str(checkpoints["two"])},
        )
        with client(serve, "three"):
            serve.reload("tessera: models: changed two")
            serve.wait(lambda: serve.ask("zwei").status_code == 200)
        assert serve.worker("tessera-two") == workers

        # Taken away.
        workers = serve.worker("tessera-two")
        serve.write(one, {**three, "model": str(checkpoints["two"])})
        # Whoever asks it meanwhile gets an answer, or is told that it is not there.
        with client(serve, "two", 404), client(serve, "Two", 404):
            serve.reload("tessera: models: taken away two")
            serve.wait(lambda: serve.ask("two").status_code == 404)
        assert len(workers) == 2 and serve.worker("tessera-two") == []
        assert "killing" not in serve.log.read_text()

        # Nothing of it, and what only a restart changes.
        serve.write(one, {**three, "model": str(checkpoints["two"])}, agg_workers=2)
        serve.reload("tessera: no model was added, taken away or changed")
        assert "agg-workers: 2 has changed, which takes effect after a restart" in serve.log.read_text()
        assert serve.worker("tessera-one") == [first]


@contextmanager
def slow_image(photo: bytes) -> Iterator[tuple[str, threading.Event, threading.Event]]:
    """The address of an image: whoever fetches it sets the first event, and waits for the second."""
    asked, sent = threading.Event(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.set()
            sent.wait(60)
            self.send_response(200)
            self.send_header("Content-Length", str(len(photo)))
            self.end_headers()
            self.wfile.write(photo)

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/image.jpg", asked, sent
    finally:
        sent.set()
        server.shutdown()
        server.server_close()


def test_what_is_in_flight_is_answered_before_the_workers_end(
    checkpoints: dict[str, Path], photos: dict[str, bytes], tmp_path: Path
) -> None:
    one, two, other = ({"model": str(path)} for path in checkpoints.values())
    serve = Serve(tmp_path, one, two, allow_private_media=True, media_timeout_seconds=60)
    with serve.running(), slow_image(photos["flower"]) as (url, asked, sent), ThreadPoolExecutor(1) as pool:
        image = {"model": "two", "input": [[{"type": "image_url", "image_url": {"url": url}}]]}
        answer = pool.submit(httpx.post, f"{serve.url}/v1/embeddings", json=image, timeout=60)
        assert asked.wait(60)
        (worker,) = serve.worker("tessera-two")
        serve.write(one)
        serve.process.send_signal(signal.SIGHUP)
        serve.wait(lambda: serve.ask("two").status_code == 404)
        assert serve.models()["two"]["status"] == "answers what is in flight"
        # What is told meanwhile is next.
        serve.write(one, other)
        serve.process.send_signal(signal.SIGHUP)
        serve.process.send_signal(signal.SIGHUP)
        assert serve.ask("one").status_code == 200 and serve.worker("tessera-two") == [worker]
        sent.set()
        assert answer.result().status_code == 200
        serve.wait_for("tessera: models: taken away two")
        serve.wait_for("tessera: ready: other")
        assert serve.worker("tessera-two") == [] and serve.ask("other").status_code == 200


def test_one_model_that_is_no_list_is_not_changed(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    serve = Serve(tmp_path)
    alone = {**serve.common, "model_path": str(checkpoints["one"])}
    serve.file.write_text(yaml.safe_dump(alone))
    with serve.running():
        serve.file.write_text(yaml.safe_dump({**alone, "model_path": str(checkpoints["two"])}))
        serve.reload("tessera: no model was added, taken away or changed")
        assert f"model-path: {checkpoints['two']} has changed" in serve.log.read_text()
        serve.write({"model": str(checkpoints["one"])})
        serve.reload("models has changed, which takes effect after a restart")
        assert serve.ask("one").status_code == 200


def test_a_key_is_withdrawn_by_a_restart_of_the_frontends(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-of-alice alice\nkey-of-bob bob\n")
    serve = Serve(tmp_path, {"model": str(checkpoints["one"])}, api_keys_file=str(keys))

    def statuses() -> list[int]:
        names = ("key-of-alice", "key-of-bob", "key-of-carol")
        ask = partial(httpx.get, f"{serve.url}/v1/models", timeout=60)
        return [ask(headers={"X-API-Key": name}).status_code for name in names]

    with serve.running():
        assert statuses() == [200, 200, 401]
        keys.write_text("key-of-bob bob\nkey-of-carol carol\n")
        serve.reload("tessera: no model was added, taken away or changed")
        warned = f"what --api-keys-file {keys} holds has changed, which takes effect after a restart"
        assert warned in serve.log.read_text() and statuses() == [200, 200, 401]
        # As docs/operations.md has it.
        words = {pid: command_line(pid) for pid in children(serve.process.pid)}
        (frontend,) = (pid for pid, line in words.items() if "tessera.frontend" in line)
        os.kill(frontend, signal.SIGTERM)
        serve.wait_for("listening on", count=2)
        assert statuses() == [401, 200, 200]


def test_what_cannot_be_used_changes_nothing(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    one, two = {"model": str(checkpoints["one"])}, {"model": str(checkpoints["two"])}
    serve = Serve(tmp_path, one)
    with serve.running(), client(serve, "one"):
        (pid,) = serve.worker("tessera-one")
        stays = "; the models stay as they are"
        serve.file.write_text("models: [")
        serve.reload(stays)
        serve.write(one, {"model": "/nowhere/model"})
        serve.reload(f"/nowhere/model: no such directory; a model of a hub is ORG/NAME{stays}")
        serve.write(one, two, {**two, "served_model_name": "ONE"})
        serve.reload(f"models[2]: 'ONE' is the name of {serve.file}: models[0] already")
        # Large enough for no machine.
        serve.write(two, {**one, "served_model_name": "b", "multimodal_embedding_cache_capacity_gb": 1 << 20})
        serve.reload("do not fit into memory together")
        assert "agg worker 0 of b " in serve.log.read_text()
        serve.write(
            two, {**one, "served_model_name": "b", "override_engine_args": {"text": {"max_batch_csot": 1}}}
        )
        serve.reload("max_batch_csot")
        assert serve.worker("tessera-one") == [pid] and list(serve.models()) == ["one"]
        serve.write(one, two)
        serve.reload("tessera: ready: two")
        assert serve.ask("two").status_code == 200


def test_a_model_is_downloaded_while_another_one_answers(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    one, hub_model = {"model": str(checkpoints["one"])}, {"model": REPOSITORY}
    serve = Serve(tmp_path, one)
    with local_hub(files_of(checkpoints["two"])) as hub:
        waiting = threading.Event()

        def hold(path: str) -> None:
            if path.endswith("model.safetensors"):
                waiting.wait(60)

        hub.answer = hold
        hub.token = "hf_notToBeSeenAnywhere"
        settings = hub.environment(tmp_path / "cache") | {"HF_TOKEN": hub.token}
        with serve.running(settings), client(serve, "one"):
            serve.write(one, hub_model)
            serve.process.send_signal(signal.SIGHUP)
            serve.wait(lambda: REPOSITORY in serve.models())
            refused = serve.ask(REPOSITORY)
            assert refused.status_code == 503 and "is being downloaded" in refused.text
            assert refused.headers["retry-after"]
            waiting.set()
            serve.wait_for(f"tessera: ready: {REPOSITORY}")
            assert serve.ask(REPOSITORY).status_code == 200
            cards = {
                card["id"]: card["source"] for card in httpx.get(f"{serve.url}/v1/models").json()["data"]
            }
            assert cards["one"] is None and cards[REPOSITORY]["commit"] == COMMIT
            # What is no model of the hub is said, and forgotten.
            serve.write(one, hub_model, {"model": "some-org/nothing"})
            serve.reload("; the models stay as they are")
            # Frontends take a moment to hear of it.
            serve.wait(lambda: serve.ask("some-org/nothing").status_code == 404)
            for pid in children(serve.process.pid):
                if "tessera.worker" in command_line(pid) and "tessera-one" not in command_line(pid):
                    assert not any(hub.token in value for value in environment(pid).values())


def test_too_much_memory_is_refused_before_anything_is_started(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    serve = Serve(
        tmp_path,
        {"model": str(checkpoints["one"]), "multimodal_embedding_cache_capacity_gb": 1 << 20},
        {"model": str(checkpoints["two"])},
    )
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tessera.cli", "serve", "--config", str(serve.file)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0].startswith("tessera: the models do not fit into memory together")
    assert any("agg worker 0 of one" in line and "cache of vision rows 1048576.00" in line for line in lines)
    assert any("agg worker 0 of two" in line for line in lines)
    assert lines[-1].endswith("does not fit") and len(lines) < 10
