"""What one key leaves another of a frontend as a process: places for requests, and memory for answers."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.frontend.alone import Alone, frontend_process
from tests.waiting import wait_until

pytestmark = pytest.mark.service

KEYS = {"alice": "sk-alice-0123456789", "bob": "sk-bob-0123456789"}
PLACES = 20
ANSWER_MB = 25
MIB = 1 << 20
# 1.5 million token ids: 7.7 MB, 25 as estimated; for a client that reads none the system keeps 4 of them.
LARGE = b'{"input": [%s]}' % b",".join([b"[%s]" % b",".join([b"2025"] * 500)] * 3000)


@pytest.fixture(scope="module")
def alone(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    keys = ", ".join(f"{key} {name}" for name, key in KEYS.items())
    flags = ("--max-in-flight", str(PLACES), "--max-response-mb", str(ANSWER_MB), "--open-metrics")
    folder = tmp_path_factory.mktemp("shares")
    with frontend_process(checkpoint, folder, *flags, environment={"TESSERA_API_KEYS": keys}) as running:
        yield running


def tokens(alone: Alone, name: str) -> httpx.Response:
    """Ask for something that needs no worker."""
    headers = {"authorization": f"Bearer {KEYS[name]}"}
    return alone.http.post("/tokenize", json={"input": "a short text"}, headers=headers)


def send(alone: Alone, body: bytes, *, length: int, more: str = "") -> socket.socket:
    """Send a request of alice, whose socket takes little of its answer."""
    port = alone.http.base_url.port
    assert port is not None
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", port))
    head = f"POST /tokenize HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEYS['alice']}\r\n{more}"
    head += f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def answer_bytes(alone: Alone) -> float:
    metrics = alone.http.get("/metrics").text
    (found,) = re.findall(r"^tessera_admitted_response_bytes (\S+)$", metrics, re.MULTILINE)
    return float(found)


def rests(alone: Alone) -> None:
    wait_until(lambda: not alone.in_flight and not answer_bytes(alone))


def test_bodies_that_never_end_leave_others_their_requests(alone: Alone) -> None:
    with ExitStack() as stack:
        for _ in range(2 * PLACES):
            stack.enter_context(send(alone, b"{", length=100))
        wait_until(lambda: alone.in_flight >= PLACES * 4 // 5)
        refused = tokens(alone, "alice")
        assert refused.status_code == 429 and "this API key's share" in refused.json()["error"]["message"]
        for _ in range(5):
            assert tokens(alone, "bob").status_code == 200
    rests(alone)
    assert tokens(alone, "alice").status_code == 200


@pytest.mark.parametrize("more", ["", "Connection: close\r\n"])
def test_answers_that_nobody_reads_count_until_they_are_read(alone: Alone, more: str) -> None:
    rests(alone)
    unread: list[socket.socket] = []
    rest_bytes = alone.forget_peak()
    with ExitStack() as stack:
        while len(unread) < 17:
            connection = send(alone, LARGE, length=len(LARGE), more=more)
            stack.enter_context(connection)
            status = connection.recv(12)[9:]
            if status == b"429":
                break
            assert status == b"200"
            unread.append(connection)
        # Four fifths of sixteen, and none of them has a place among the requests of the model.
        assert len(unread) == 13
        assert answer_bytes(alone) == 13 * 16 * 1_500_000
        for _ in range(5):
            assert tokens(alone, "bob").status_code == 200
        # Their own bound, and what reading and writing one at a time takes.
        assert alone.peak_bytes - rest_bytes < 16 * ANSWER_MB * MIB + 128 * MIB
        # What is read is given back.
        rest = b""
        while not rest.endswith(b"]}"):
            piece = unread[0].recv(1 << 20)
            assert piece
            rest = (rest + piece)[-2:]
        wait_until(lambda: answer_bytes(alone) == 12 * 16 * 1_500_000)
    rests(alone)
