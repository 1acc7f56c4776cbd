"""Three frontends that answer on one port, as one service."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from http.client import HTTPConnection, HTTPException
from itertools import cycle, islice
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.inputs import data_url
from tests.e2e.service import MODEL, Service, launch
from tests.proc import open_files
from tests.signals import freeze
from tests.waiting import wait_until

pytestmark = pytest.mark.service

FRONTENDS = 3
KEYS = {name: f"sk-one-port-{name}" for name in ("steady", "hasty", "greedy", "modest")}
PER_MINUTE = 240
# Tokens that wait for the worker's engine, and in its batches, of which it begins one at a time.
QUEUE, BATCH = 4096, 2048
ROOM = QUEUE + BATCH


@pytest.fixture(scope="module")
def service(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("one-port")
    log, config = folder / "log", folder / "engine.yaml"
    config.write_text(f"text: {{max_batch_cost: {BATCH}, max_queue_cost: {QUEUE}}}")
    environment = {
        "TESSERA_AGG_ENGINE_ARGS": str(config),
        "TESSERA_API_KEYS": ",".join(f"{key} {name}" for name, key in KEYS.items()),
        "TESSERA_FRONTEND_ARGS": f"--requests-per-minute {PER_MINUTE} --open-metrics --result-cache-mb 8",
    }
    with launch(
        "agg.sh", checkpoint, log, workers=1, frontends=FRONTENDS, environment=environment
    ) as running:
        yield running


@pytest.fixture
def whole(service: Service) -> Service:
    wait_whole(service)
    return service


def wait_whole(service: Service) -> None:
    wait_until(lambda: all(known(url) == (FRONTENDS, 1) for url in (service.url, *service.frontend_urls)))


def known(url: str) -> tuple[int, int]:
    """The frontends and the embed workers that a frontend tells of; zeros where none answers."""
    try:
        said = httpx.get(f"{url}/health", timeout=60).json()
    except httpx.TransportError:
        return 0, 0
    return said["frontends"], said["workers"]["embed"]


def frontends(service: Service) -> list[int]:
    return service.pids_in_order(FRONTENDS + 1)[:FRONTENDS]


class Connection:
    """A kept connection to the port that all share."""

    def __init__(self, service: Service) -> None:
        port = int(service.url.rpartition(":")[2])
        self._http = HTTPConnection("127.0.0.1", port, timeout=30)
        self._http.connect()
        # A broken one must not be replaced.
        self._http.auto_open = 0
        self.socket = self._http.sock

    def answers(self) -> bool:
        """Whether a request is answered; false when the connection breaks."""
        try:
            self._http.request("GET", "/live")
            return self._http.getresponse().read() == b'{"status":"live"}'
        except (ConnectionError, HTTPException):
            return False

    def close(self) -> None:
        self._http.close()


def owners(connections: list[Connection], pids: list[int]) -> list[int]:
    """The process that has taken each connection."""
    holders = {}
    for pid in pids:
        holders |= dict.fromkeys(open_files(pid), pid)
    # The other end's line in the table of connections names this end second.
    inodes = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        inodes[fields[1], fields[2]] = f"socket:[{fields[9]}]"
    found = []
    for connection in connections:
        here, there = (f"0100007F:{end[1]:04X}" for end in ends(connection))
        found.append(holders[inodes[there, here]])
    return found


def ends(connection: Connection) -> tuple[tuple[str, int], tuple[str, int]]:
    return connection.socket.getsockname(), connection.socket.getpeername()


def answered(connections: list[Connection]) -> int:
    return sum(one.answers() for one in connections)


def opened(stack: ExitStack, service: Service, count: int) -> list[Connection]:
    """So many connections in a burst, of which each has been answered."""
    connections = [stack.enter_context(closing(Connection(service))) for _ in range(count)]
    assert answered(connections) == len(connections)
    return connections


def post(url: str, key: str, body: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEYS[key]}"}
    return httpx.post(f"{url}/v1/embeddings", json=body, headers=headers, timeout=60)


def test_each_frontend_takes_its_part_of_the_connections(whole: Service) -> None:
    with ExitStack() as stack:
        connections = opened(stack, whole, 240)
        taken = Counter(owners(connections, frontends(whole)))
    assert len(taken) == FRONTENDS
    assert all(64 <= count <= 96 for count in taken.values()), taken


def test_a_frozen_frontend_holds_up_no_new_connection(whole: Service) -> None:
    with ExitStack() as stack:
        victim = frontends(whole)[1]
        freeze(victim)
        try:
            connections = opened(stack, whole, 60)
            assert victim not in owners(connections, frontends(whole))
            wait_until(lambda: known(whole.url) == (FRONTENDS - 1, 1))
        finally:
            os.kill(victim, signal.SIGCONT)
        wait_until(lambda: known(whole.url) == (FRONTENDS, 1))
        assert answered(connections) == len(connections)


def counted(url: str) -> dict[str, float]:
    """Counters and histograms, by name and labels."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=60).text)
    return {
        f"{sample.name} {sorted(sample.labels.items())}": sample.value
        for family in families
        for sample in family.samples
        if family.type in ("counter", "histogram")
    }


def test_metrics_and_status_count_all_frontends(whole: Service) -> None:
    of = f"('model', '{MODEL}')"
    key = f"tessera_requests_total [{of}, ('route', '/v1/embeddings'), ('status', '200')]"
    # An answer is counted once it has been sent, so that the last ones of other tests may still come.
    wait_until(lambda: not whole.frontend_metric("tessera_requests_in_flight"))
    before = counted(whole.url)
    expected = before.get(key, 0) + FRONTENDS
    for url in whole.frontend_urls:
        assert post(url, "steady", {"model": MODEL, "input": "counted"}).status_code == 200
    wait_until(lambda: counted(whole.url)[key] >= expected)
    for url in (whole.url, *whole.frontend_urls):
        found = counted(url)
        assert found[key] == expected
        assert not [name for name, value in before.items() if found[name] < value]
        status = httpx.get(f"{url}/status", headers={"x-api-key": KEYS["steady"]}).json()
        assert status["frontend"]["inputs"]["text"] == found[f"tessera_inputs_total [('kind', 'text'), {of}]"]


def test_what_one_frontend_has_computed_is_a_hit_at_another(whole: Service) -> None:
    hits = f"tessera_result_cache_total [('model', '{MODEL}'), ('outcome', 'hit')]"
    body = {"model": MODEL, "input": "asked of each frontend"}
    before = counted(whole.url).get(hits, 0)
    vectors = [post(url, "steady", body).json()["data"] for url in whole.frontend_urls]
    assert vectors[1:] == vectors[:1] * (FRONTENDS - 1)
    assert counted(whole.url)[hits] == before + FRONTENDS - 1


def test_an_image_that_one_frontend_was_sent_is_known_to_all(
    whole: Service, photos: dict[str, bytes]
) -> None:
    def body(image: str | None) -> dict[str, object]:
        part = {"type": "image_url", "image_url": image, "uuid": "a heart"}
        return {"model": MODEL, "messages": [{"role": "user", "content": [part]}]}

    first, second, third = whole.frontend_urls
    assert post(second, "steady", body(None)).status_code == 422
    sent = [data_url(photos[name]) for name in ("china", "flower")]
    vectors = [post(first, "steady", body(one)).json()["data"] for one in sent]
    assert vectors[0] != vectors[1]
    # What was sent last under a name counts, wherever it was.
    assert post(second, "steady", body(None)).json()["data"] == vectors[1]
    assert post(third, "steady", body(sent[0])).json()["data"] == vectors[0]
    assert post(first, "steady", body(None)).json()["data"] == vectors[0]
    # Names are each client's own.
    assert post(first, "hasty", body(None)).status_code == 422


def test_a_frontend_that_is_killed_loses_its_own_connections_alone(whole: Service) -> None:
    with ExitStack() as stack:
        connections = opened(stack, whole, 60)
        pids = frontends(whole)
        held = owners(connections, pids)
        before = counted(whole.url)
        os.kill(pids[2], signal.SIGKILL)
        wait_until(lambda: f"(pid {pids[2]}) ended" in whole.log.read_text())
        kept = [one.answers() for one in connections]
        assert kept == [pid != pids[2] for pid in held]
        # The others take all while it is started again.
        assert opened(stack, whole, 30)
        now = counted(whole.url)
        assert not [name for name, value in before.items() if now[name] < value]
    wait_whole(whole)
    now = counted(whole.frontend_urls[2])
    assert not [name for name, value in before.items() if now[name] < value]


def test_a_rolling_restart_refuses_nobody(whole: Service) -> None:
    """Each request comes by a connection of its own: one that is in the queue outlives whoever ends."""
    count = 0
    for number in (0, 1):
        pid = frontends(whole)[number]
        os.kill(pid, signal.SIGTERM)

        def back() -> bool:
            nonlocal count
            answer = post(whole.url, "steady", {"model": MODEL, "input": f"one of {count}"})
            assert answer.status_code == 200, answer.text
            count += 1
            return frontends(whole)[number] not in (-1, pid) and known(whole.url) == (FRONTENDS, 1)  # noqa: B023

        # Its pauses are within the key's rate.
        wait_until(back)
        assert f"(pid {pid}) ended with status 0" in whole.log.read_text()
    assert count


def test_a_key_has_one_rate_at_all_frontends(whole: Service) -> None:
    """Nobody is let in beyond a minute's worth, and a frontend that is started again gives no second one."""
    began = time.monotonic()
    admitted = ask_until_refused(whole.frontend_urls)
    ended = time.monotonic()
    assert PER_MINUTE <= admitted <= PER_MINUTE + (ended - began) * PER_MINUTE / 60
    pid = frontends(whole)[0]
    os.kill(pid, signal.SIGKILL)
    wait_until(
        lambda: frontends(whole)[0] not in (-1, pid) and known(whole.frontend_urls[0]) == (FRONTENDS, 1)
    )
    assert ask_until_refused(whole.frontend_urls[:1]) <= 1 + (time.monotonic() - ended) * PER_MINUTE / 60
    assert post(whole.frontend_urls[1], "steady", {}).status_code == 400


def ask_until_refused(urls: Sequence[str]) -> int:
    """Ask these in turn for as long as none refuses a key's next request; how many they have let in.

    By one connection each: with a new one for each request a busy machine was slower than the rate.
    """
    with ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(base_url=url)) for url in urls]
        for admitted, client in enumerate(islice(cycle(clients), 10 * PER_MINUTE)):
            headers = {"authorization": f"Bearer {KEYS['hasty']}"}
            answer = client.post("/v1/embeddings", headers=headers, json={})
            if answer.status_code == 429:
                return admitted
            assert answer.status_code == 400, answer.text
    raise AssertionError(f"{10 * PER_MINUTE} requests were let in")


def test_a_key_has_one_share_at_all_frontends(whole: Service) -> None:
    """Four fifths of what the worker takes are the most for one key, however many frontends it asks."""
    # Each counts as a quarter of that.
    body = {"model": MODEL, "input": ["word " * 100] * 64}
    worker = whole.pids_in_order(FRONTENDS + 1)[FRONTENDS]
    freeze(worker)
    with ThreadPoolExecutor(4) as pool:
        try:
            held = []
            for number, url in enumerate(whole.frontend_urls):
                held.append(pool.submit(post, url, "greedy", body))
                wait_until(lambda number=number: in_flight(whole) == number + 1)
            refused = [post(url, "greedy", body) for url in whole.frontend_urls]
            assert [answer.status_code for answer in refused] == [429] * FRONTENDS, refused[0].text
            held.append(pool.submit(post, whole.frontend_urls[0], "modest", body))
            wait_until(lambda: in_flight(whole) == FRONTENDS + 1)
        finally:
            os.kill(worker, signal.SIGCONT)
        assert [one.result().status_code for one in held] == [200] * (FRONTENDS + 1)


def in_flight(service: Service) -> int:
    """Requests whose tokens the frontends have counted."""
    families = text_string_to_metric_families(httpx.get(f"{service.url}/metrics", timeout=60).text)
    (tokens,) = (
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == "tessera_admitted_tokens"
    )
    return int(tokens // (ROOM // 4))
