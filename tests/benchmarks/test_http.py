from __future__ import annotations

import asyncio
import csv
import json
import time
from contextlib import suppress
from io import BytesIO
from itertools import islice
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import http
from tessera.frontend.media.loader import decode
from tessera.models.base import Content, Truncate
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tessera_tools.load import clients
from tessera_tools.load.bodies import WORKLOADS, Bodies, HttpWorkload
from tessera_tools.load.clients import Load, Plan, _Load
from tessera_tools.load.words import CheckpointWords
from tessera_tools.table import number, table
from tests.e2e.disaggregated import KEY, Disaggregated
from tests.e2e.service import MODEL
from tests.figure import figure


@pytest.fixture(scope="module")
def words(checkpoint: Path) -> CheckpointWords:
    return CheckpointWords(checkpoint)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> LlamaNemotronVL:
    return LlamaNemotronVL(checkpoint)


def test_texts_have_the_tokens_they_claim(model: LlamaNemotronVL, words: CheckpointWords) -> None:
    workload = HttpWorkload(name="text", tokens=40, inputs=3)
    bodies = list(islice(Bodies(workload, words, "m", seed=1, variety=2), 2))
    assert bodies[0].data != bodies[1].data
    for body in bodies:
        texts = json.loads(body.data)["input"]
        assert len(texts) == body.inputs == 3
        for text in texts:
            options = {"max_tokens": 100, "truncate": Truncate.NONE, "param": "input"}
            assert len(model.prompt(Content(parts=(text,)), **options).tokens) == 40


@pytest.mark.parametrize("fresh", [True, False])
def test_images_are_new_or_come_again(words: CheckpointWords, fresh: bool) -> None:
    workload = HttpWorkload(name="tile", size=(48, 32), fresh=fresh)
    bodies = list(islice(Bodies(workload, words, "m", seed=1), 200))
    assert len({body.data for body in bodies}) == (200 if fresh else 64)
    by_key = {}
    for body in bodies:
        url = json.loads(body.data)["messages"][0]["content"][0]["image_url"]["url"]
        image = Image.open(BytesIO(decode(url, param="input", max_bytes=1 << 20)))
        assert image.size == (48, 32)
        assert by_key.setdefault(body.key, image.tobytes()) == image.tobytes()
    assert len(by_key) == 8


def test_encoding_always_gives_texts_a_blank_image_of_their_own(words: CheckpointWords) -> None:
    shape = {"size": (48, 32), "tokens": 20, "text_share": 0.7}
    plain = list(islice(Bodies(HttpWorkload(name="mixed", **shape), words, "m", seed=1), 100))
    always = HttpWorkload(name="always", always_image=True, **shape)
    bodies = list(islice(Bodies(always, words, "m", seed=1), 100))
    assert {"input" in json.loads(body.data) for body in plain} == {True, False}
    assert all("messages" in json.loads(body.data) for body in bodies)
    assert len({body.data for body in bodies}) == 100
    assert [body.key for body in bodies] == [body.key for body in plain]


def test_bodies_of_passages_and_of_pages(words: CheckpointWords) -> None:
    workload = HttpWorkload(name="rerank", query=4, tokens=20, inputs=6)
    bodies = list(islice(Bodies(workload, words, "m", seed=1, variety=10), 20))
    found = [json.loads(body.data) for body in bodies]
    assert {body.path for body in bodies} == {"/v1/score"} and {body.inputs for body in bodies} == {6}
    assert len({body["queries"] for body in found}) == 8
    assert {words.tokens(body["queries"]) for body in found} == {4}
    assert {words.tokens(text) for body in found for text in body["documents"]} == {20}
    for fresh in (True, False):
        pages = HttpWorkload(name="pages", query=4, size=(48, 32), inputs=3, fresh=fresh)
        bodies = list(islice(Bodies(pages, words, "m", seed=1), 16))
        urls = [
            document["content"][0]["image_url"]["url"]
            for body in bodies
            for document in json.loads(body.data)["documents"]
        ]
        assert len(urls) == 48 and len(set(urls)) == (48 if fresh else 10)


@pytest.mark.service
@pytest.mark.measures
@pytest.mark.xdist_group("shared-service")
def test_scores_are_driven_and_checked(service: Disaggregated) -> None:
    workload = HttpWorkload(name="rerank", query=4, tokens=12, inputs=5)
    load = Load(
        words=CheckpointWords(service.checkpoint), model_name=MODEL, clients=1, warm=0.2, seconds=1.5, key=KEY
    )
    outcome = clients.drive(load, (service.url,), workload, 2)
    assert outcome.failed == "0" and outcome.checked > 0
    assert outcome.inputs == 5 * len(outcome.latencies)


@pytest.mark.parametrize("rate", [None, 50.0])
async def test_a_window_stays_open_until_something_was_answered(
    words: CheckpointWords, rate: float | None
) -> None:
    """A service that answers nobody before the window is over."""
    over = asyncio.Event()
    body = b'{"data": [{"embedding": [1.0]}]}'

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(head.partition(b"Content-Length: ")[2].split()[0]))
                await over.wait()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        load = Load(words=words, model_name=MODEL, clients=1, warm=0.0, seconds=0.05)
        workload = HttpWorkload(name="text", tokens=4)
        plan = Plan(load=load, urls=(url,), workload=workload, concurrency=2, rate=rate, seed=1)
        start = time.time()
        driven = _Load(plan, iter(Bodies(workload, words, MODEL, seed=1)), start)
        running = asyncio.create_task(driven.run(lambda: None))
        await asyncio.sleep(0.2)
        over.set()
        outcome = await running
    assert outcome.failed == "0" and outcome.checked >= 1
    assert outcome.requests_rate > 0 and outcome.seconds >= 0.2


def drive(checkpoint: Path, out: Path, *flags: str) -> list[dict[str, str]]:
    """The rows of its table."""
    arguments = ["--size", "tiny", "--model-path", str(checkpoint), "--clients", "1", "--concurrency", "2"]
    arguments += ["--workloads", "text-32", "tile", "--warm", "0.2", "--seconds", "1", "--threads", "1"]
    assert http.main([*arguments, "--tokens", "1024", "--units", "2", "--out", str(out), *flags]) == 0
    with (out / "http.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["workload"] for row in rows] == ["text-32", "tile"]
    for row in rows:
        assert row["errors"] == "0"
        assert figure(row["requests/s"]) > 0
        assert int(row["checked"]) > 0
    return rows


@pytest.mark.service
@pytest.mark.measures
@pytest.mark.usefixtures("forks")
def test_drives_a_service_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    for row in drive(checkpoint, tmp_path):
        shares = ("of engine %", "frontend cores", "worker cores", "decoder cores")
        assert all(figure(row[share]) > 0 for share in shares if row["workload"] == "tile")
        assert figure(row["engine/s"]) > 0


@pytest.mark.service
@pytest.mark.measures
@pytest.mark.xdist_group("shared-service")
def test_drives_a_service_that_runs(service: Disaggregated, tmp_path: Path) -> None:
    """In an open loop; what the machine allows is not measured beside it."""
    with service.frontend("--max-in-flight", "100000") as url:
        rows = drive(service.checkpoint, tmp_path, "--url", url, "--model-name", MODEL, "--rate", "20")
    assert {row["engine/s"] for row in rows} == {"-"}


def test_unknown_workloads_are_named(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="'nothing' is none of"):
        http.main(["--url", "http://127.0.0.1:1", "--model-path", str(checkpoint), "--workloads", "nothing"])


def test_table_and_numbers() -> None:
    assert table(("a", "bb"), [("x", "1")]) == "a  bb\n-  --\nx   1"
    assert [number(value) for value in (None, 0.12345, 12.345, 1234.5)] == ["-", "0.123", "12.3", "1,234"]
    assert set(WORKLOADS) >= {"text-1024", "text-128", "text-32x64", "tile", "page", "tile-again", "mixed"}
