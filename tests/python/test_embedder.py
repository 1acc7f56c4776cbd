"""An ``Embedder`` beside a service with the same checkpoint, and its life in a program."""

from __future__ import annotations

import base64
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from benchmarks.proc import below
from PIL import Image

from tessera import Embedder
from tessera.errors import InvalidInput, MediaFetchError, TesseraError, Unavailable, UnsupportedMedia
from tests.e2e.disaggregated import Disaggregated
from tests.proc import command_line
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.service,
    pytest.mark.xdist_group("shared-service"),
    pytest.mark.usefixtures("forks"),
]


@pytest.fixture(scope="module")
def embedder(checkpoint: Path) -> Iterator[Embedder]:
    with Embedder(checkpoint, gpus=1, allow_private_media=True) as embedder:
        yield embedder


@pytest.fixture(scope="module")
def folder(photos: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for name, data in photos.items():
        (folder / f"{name}.jpg").write_bytes(data)
    return folder


def url_of(data: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"


def engines() -> set[int]:
    """The processes of engines below this one."""
    return {pid for pid in below(os.getpid()) if any("tessera.local" in word for word in command_line(pid))}


def assert_same(vectors: np.ndarray, expected: np.ndarray | list[list[float]]) -> None:
    wanted = np.array(expected, np.float32)
    assert vectors.shape == wanted.shape and vectors.dtype == np.float32
    assert (vectors * wanted).sum(axis=1).min() >= 0.9999


@pytest.mark.parametrize("role", [None, "query", "passage"])
def test_texts_are_those_of_the_service(embedder: Embedder, service: Disaggregated, role: str | None) -> None:
    texts = ["a yellow heart", "ein gelbes Herz", "\u4e00" * 300, "word " * 200]
    options = {} if role is None else {"input_type": role}
    assert_same(embedder.embed(texts, role=role), service.embed(*texts, **options))  # type: ignore[arg-type]


def test_widths_are_those_that_the_model_offers(embedder: Embedder, service: Disaggregated) -> None:
    assert embedder.model.dimensions == (32, 64) and embedder.model.width not in (32, 64)
    assert_same(embedder.embed(["a text"], dimensions=32), service.embed("a text", dimensions=32))
    with pytest.raises(InvalidInput, match=r"^dimensions 33: this model offers 32, 64, \d+$"):
        embedder.embed(["a text"], dimensions=33)


def test_pictures_of_each_form_are_those_of_the_service(
    embedder: Embedder, service: Disaggregated, photos: dict[str, bytes], folder: Path
) -> None:
    path, data = folder / "china.jpg", photos["china"]
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        web = f"http://127.0.0.1:{server.server_port}/china.jpg"
        forms = [path, data, Image.open(path), str(path), web, url_of(data)]
        vectors = embedder.embed([*forms[:3], *({"image": form} for form in forms)])
        with pytest.raises(MediaFetchError, match=r"^input\[0\]: .*404"):
            embedder.embed([{"image": f"{web}.gone"}])
        server.shutdown()
    expected = service.embed({"image": url_of(data)})
    assert_same(vectors, expected * 9)


def test_mixed_inputs_are_those_of_the_service(
    embedder: Embedder, service: Disaggregated, photos: dict[str, bytes], folder: Path
) -> None:
    china, flower = folder / "china.jpg", Image.open(folder / "flower.jpg")
    mixed = ["a text", {"text": "a temple", "image": china}, ["before", flower, "between", china], [china]]
    sent = {name: {"type": "image_url", "image_url": {"url": url_of(data)}} for name, data in photos.items()}
    texts = [{"type": "text", "text": text} for text in ("before", "between")]
    expected = service.embed(
        "a text",
        {"text": "a temple", "image": url_of(photos["china"])},
        {"content": [texts[0], sent["flower"], texts[1], sent["china"]]},
        {"content": [sent["china"]]},
        input_type="query",
    )
    assert_same(embedder.embed(mixed, role="query"), expected)  # type: ignore[arg-type]


def test_scores_of_a_model_of_vectors_are_cosines(embedder: Embedder, photos: dict[str, bytes]) -> None:
    documents = ["a text", photos["china"], "another"]
    vectors = embedder.embed(documents, role="passage")
    (query,) = embedder.embed(["a temple"], role="query")
    ranked = embedder.rerank("a temple", documents, logits=True)
    assert [result.score for result in sorted(ranked)] == pytest.approx((vectors @ query).tolist(), abs=1e-5)
    assert ranked == sorted(ranked, key=lambda result: -result.score)
    assert embedder.rerank("a temple", documents, top_n=1) == ranked[:1]
    assert embedder.rerank("a temple", []) == []


def test_errors_name_the_input(embedder: Embedder) -> None:
    good = ["a text"] * 100
    with pytest.raises(UnsupportedMedia, match=r"^input\[100\] is no image") as caught:
        embedder.embed([*good, b"no image", "a text", "word " * 20_000])
    assert caught.value.param == "input[100]"
    with pytest.raises(InvalidInput, match=r"^input\[100\] has \d+ tokens with its prompt"):
        embedder.embed([*good, "word " * 20_000, b"no image"])
    with pytest.raises(UnsupportedMedia, match=r"^documents\[100\] is no image"):
        embedder.rerank("a query", [*good, b"no image"])
    with pytest.raises(UnsupportedMedia, match=r"^query is no image"):
        embedder.rerank(b"no image", good)
    for wrong in ({"role": "document"}, {"instruction": ""}, {"dimensions": "32"}):
        with pytest.raises(InvalidInput, match=f"^{next(iter(wrong))}"):
            embedder.embed(good, **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"^top_n"):
        embedder.rerank("a query", good, top_n=0)


def test_nothing_gives_an_array_without_rows(embedder: Embedder) -> None:
    assert embedder.embed([]).shape == (0, embedder.model.width)
    assert embedder.embed(iter(()), dimensions=32).shape == (0, 32)


def test_a_generator_is_taken_as_far_as_it_is_needed(
    embedder: Embedder, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = count()

    class Stop(Exception):
        pass

    def report(done: int, total: int | None) -> None:
        assert total is None
        raise Stop

    with pytest.raises(Stop):
        embedder.embed((f"text {next(taken)}" for _ in count()), progress=report)
    assert next(taken) <= 4096 + 2 * 64
    texts = [f"text {number}" for number in range(1500)]
    vectors = embedder.embed(iter(texts), progress=True)
    assert_same(vectors[::300], embedder.embed(texts[::300]))
    assert len(vectors) == 1500 and vectors.flags.writeable and vectors.base is None
    assert capsys.readouterr().err.rpartition("\r")[2].startswith("1,500 done, ")
    reports: list[tuple[int, int | None]] = []
    embedder.embed(texts[:100], progress=lambda *report: reports.append(report))
    assert reports == [(64, 100), (100, 100)]


def test_threads_embed_at_once(embedder: Embedder) -> None:
    results: dict[int, np.ndarray] = {}

    def embed(number: int) -> None:
        results[number] = embedder.embed([f"text {number} {index}" for index in range(200)])

    threads = [threading.Thread(target=embed, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, vectors in results.items():
        assert_same(vectors[199:], embedder.embed([f"text {number} 199"]))
    assert len(results) == 4


def test_an_interrupt_ends_the_call_alone(embedder: Embedder) -> None:
    before = engines()
    threading.Timer(1, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        embedder.embed(f"text {number}" for number in count())
    assert embedder.embed(["a text"]).shape == (1, embedder.model.width) and engines() == before


def test_a_forked_process_is_refused_and_leaves_its_parent_alone(embedder: Embedder) -> None:
    if not (pid := os.fork()):
        try:
            embedder.embed(["a text"])
        except Unavailable:
            embedder.close()
            os._exit(42)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
    assert embedder.embed(["a text"]).shape == (1, embedder.model.width)


def test_the_end_of_a_block_ends_processes_and_calls(checkpoint: Path) -> None:
    before, ended = engines(), list[TesseraError]()

    def embed(embedder: Embedder) -> None:
        try:
            embedder.embed(f"text {number}" for number in count())
        except TesseraError as error:
            ended.append(error)

    with Embedder(checkpoint, gpus=1, truncate="end", max_tokens=8) as embedder:
        assert_same(embedder.embed(["word " * 100]), embedder.embed(["word " * 50]))
        with pytest.raises(MediaFetchError, match=r"^input\[0\]: 127.0.0.1 may not be fetched"):
            embedder.embed([{"image": "http://127.0.0.1:1/a.png"}])
        thread = threading.Thread(target=embed, args=(embedder,))
        thread.start()
        time.sleep(0.5)
        assert len(engines() - before) == 2
        # Its copy of the descriptors does not keep the engine.
        if not (pid := os.fork()):
            time.sleep(60)
            os._exit(0)
    thread.join()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert engines() == before and isinstance(ended[0], Unavailable)
    embedder.close()
    with pytest.raises(Unavailable, match=r"^this Embedder is closed$"):
        embedder.embed([])


def test_what_nobody_refers_to_ends(checkpoint: Path) -> None:
    before = engines()
    embedder = Embedder(str(checkpoint), gpus=1)
    assert len(engines() - before) == 2
    del embedder
    gc.collect()
    wait_until(lambda: engines() == before)


def test_what_cannot_be_started_is_refused_at_once(checkpoint: Path, tmp_path: Path) -> None:
    before = engines()
    for wrong, match in (
        ({"model": tmp_path}, "config.json: there is no such file"),
        ({"truncate": "middle"}, "^truncate: expected none, start or end"),
        ({"gpus": 0}, "^gpus: expected a number of at least 1"),
        ({"max_tokens": -1}, "^max_tokens: expected a number of at least 0"),
        ({"worker_flags": ["--nothing"]}, "unrecognized arguments: --nothing"),
        ({"worker_flags": ["--extra-engine-args", str(tmp_path / "no.yaml")]}, "no.yaml: No such file"),
        ({"revision": "main"}, "is a directory here, which has no revisions"),
    ):
        with pytest.raises(TesseraError, match=match):
            Embedder(**{"model": checkpoint, **wrong})  # type: ignore[arg-type]
    assert engines() == before
