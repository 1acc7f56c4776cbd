"""Clients that leave at once, from a frontend as a process: its log has no error, and it goes on."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.authority import Authority, needs_openssl
from tests.frontend.alone import Alone, frontend_process

pytestmark = pytest.mark.service

HEAD = b"%s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
GET = HEAD % (b"GET /v1/models", 0)
DAMAGED = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\nZZ\r\n"
# The first bytes of a client's hello, of which more is to come.
HALF_A_HELLO = b"\x16\x03\x01\x02\x00\x01"


@pytest.fixture(scope="module")
def waiting() -> Iterator[bytes]:
    """A request that is under way for as long as its client is there: its image's host says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.png"
        body = b'{"input": [{"image": "%s"}]}' % url.encode()
        yield HEAD % (b"POST /v1/embeddings", len(body)) + body


@pytest.fixture(scope="module")
def plain(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    with frontend_process(checkpoint, tmp_path_factory.mktemp("plain"), "--allow-private-media") as alone:
        yield alone


@pytest.fixture(scope="module")
def secured(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    folder = tmp_path_factory.mktemp("secured")
    cert, key = Authority(folder).sign("service")
    with frontend_process(checkpoint, folder, "--tls-cert", str(cert), "--tls-key", str(key)) as alone:
        yield alone


def hang_up(alone: Alone, sent: bytes, *, resets: bool, after: float = 0.0) -> None:
    with socket.create_connection(("127.0.0.1", alone.http.base_url.port or 0)) as client:
        if resets:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.sendall(sent)
        time.sleep(after)


def check_log(alone: Alone) -> None:
    """It has read all that came, and had no error with any of it."""
    for _ in range(3):
        assert alone.http.get("/health").status_code in (200, 503)
    log = alone.log.read_text()
    assert " ERROR " not in log and "Traceback" not in log, log[-4000:]


@pytest.mark.parametrize("resets", [True, False], ids=["reset", "close"])
@pytest.mark.parametrize("before", [b"", GET], ids=["first", "second"])
@pytest.mark.parametrize(
    "behind",
    [None, b"", GET, GET * 3, DAMAGED, b"no HTTP\r\n\r\n"],
    ids=["itself", "nothing", "one", "three", "damaged", "no HTTP"],
)
def test_a_client_that_leaves_while_its_request_is_under_way(
    plain: Alone, waiting: bytes, before: bytes, behind: bytes | None, resets: bool
) -> None:
    sent = before + waiting + (waiting if behind is None else behind)
    for number in range(50):
        hang_up(plain, sent, resets=resets, after=0.001 * (number % 5))
    check_log(plain)


@pytest.mark.parametrize("resets", [True, False], ids=["reset", "close"])
@pytest.mark.parametrize(
    "sent", [GET, GET * 5, GET + DAMAGED, DAMAGED], ids=["one", "five", "two", "damaged"]
)
def test_a_client_that_does_not_wait_for_its_answer(plain: Alone, sent: bytes, resets: bool) -> None:
    for number in range(50):
        hang_up(plain, sent, resets=resets, after=0.0005 * (number % 8))
    check_log(plain)


@needs_openssl
@pytest.mark.parametrize("resets", [True, False], ids=["reset", "close"])
@pytest.mark.parametrize(
    "sent",
    [HALF_A_HELLO, b"\x16", b"", GET, bytes(20_000)],
    ids=["half", "a byte", "nothing", "HTTP", "zeros"],
)
def test_a_client_that_leaves_within_its_handshake(secured: Alone, sent: bytes, resets: bool) -> None:
    for number in range(300 if sent == HALF_A_HELLO else 60):
        hang_up(secured, sent, resets=resets, after=0.001 * (number % 4 == 3))
    check_log(secured)
