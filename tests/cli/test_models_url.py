"""``tessera models --url`` where nothing useful answers."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tessera.cli.models import main
from tests.authority import Authority, needs_openssl


@contextmanager
def listening(context: ssl.SSLContext | None = None) -> Iterator[int]:
    """The port of a server, which speaks TLS with a ``context``."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@needs_openssl
def test_a_port_that_speaks_tls_is_said_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain, key = Authority(tmp_path).sign("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    with listening(context) as port:
        assert main(["--url", f"http://127.0.0.1:{port}"]) == 1
    assert f"its port speaks TLS, ask https://127.0.0.1:{port}" in capsys.readouterr().err


def test_a_port_that_does_not_speak_tls_is_said_to(capsys: pytest.CaptureFixture[str]) -> None:
    with listening() as port:
        assert main(["--url", f"https://127.0.0.1:{port}"]) == 1
    assert f"its port does not speak TLS, ask http://127.0.0.1:{port}" in capsys.readouterr().err


def test_a_port_where_nobody_listens_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:1"]) == 1
    said = capsys.readouterr().err
    assert "no answer from http://127.0.0.1:1" in said and "TLS" not in said
