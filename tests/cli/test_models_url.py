"""``tessera models --url`` where nothing useful answers."""

from __future__ import annotations

import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tessera.cli.models import main
from tests.authority import Authority, needs_openssl


@needs_openssl
def test_a_port_that_speaks_tls_is_said_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain, key = Authority(tmp_path).sign("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert main(["--url", f"http://127.0.0.1:{server.server_port}"]) == 1
        finally:
            server.shutdown()
            thread.join()
    said = capsys.readouterr().err
    assert f"its port speaks TLS, ask https://127.0.0.1:{server.server_port}" in said


def test_a_port_that_does_not_speak_tls_is_said_to(capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert main(["--url", f"https://127.0.0.1:{server.server_port}"]) == 1
        finally:
            server.shutdown()
            thread.join()
    said = capsys.readouterr().err
    assert f"its port does not speak TLS, ask http://127.0.0.1:{server.server_port}" in said


def test_a_port_where_nobody_listens_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:1"]) == 1
    said = capsys.readouterr().err
    assert "no answer from http://127.0.0.1:1" in said and "TLS" not in said
