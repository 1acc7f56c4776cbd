"""What another key feels, as it is counted."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from benchmarks.flood import Felt, probe
from benchmarks.floods import Target
from benchmarks.ports import free_ports

from tests.waiting import wait_until


class Refuses(BaseHTTPRequestHandler):
    """Lives, embeds one short text, and refuses all else at once."""

    asked = 0

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        type(self).asked += 1
        self.send_response(200 if self.path == "/live" or b"a short text 0" in body else 429)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def refusing() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever).start()
        yield server.server_port
        server.shutdown()


def test_refusals_are_no_answers(refusing: int) -> None:
    (closed,) = free_ports(1)
    target = Target(port=refusing, grpc_port=closed, model="m", pictures=1, answers=[])
    ours, theirs = multiprocessing.Pipe()
    asking = threading.Thread(target=probe, args=(target, theirs))
    asking.start()
    wait_until(lambda: Refuses.asked > 40)
    ours.send(None)
    felt: Felt = ours.recv()
    asking.join()
    assert felt.failed > 10 and len(felt.seconds["/live"]) > 1
    counts = {kind: len(seconds) for kind, seconds in felt.seconds.items() if kind != "/live"}
    assert counts == {"short": 1, "long": 0, "picture": 0, "KServe": 1, "gRPC": 0}
