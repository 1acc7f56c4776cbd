"""Commands that ask a service whose certificate nobody knows."""

from __future__ import annotations

import http.server
import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.authority import Authority, needs_openssl

pytestmark = [pytest.mark.starts, needs_openssl]


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "a-model"}], "models": []}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def service(tmp_path: Path) -> Iterator[str]:
    """The URL of a service by TLS; its authority is in the folder."""
    cert, key = Authority(tmp_path).sign("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"https://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("command", ["models", "bench", "embed"])
def test_a_certificate_that_nobody_knows_names_the_variable(
    service: str, command: str, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("a text")
    words = [command, "--url", service]
    if command == "embed":
        words += [str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SSL_CERT")}
    run = [sys.executable, "-m", "tessera.cli", *words]
    refused = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=180, check=False)
    (line,) = refused.stderr.splitlines()
    assert refused.returncode == 1 and "CERTIFICATE_VERIFY_FAILED" in line
    assert "SSL_CERT_FILE names a PEM file with the certificate" in line
    environment["SSL_CERT_FILE"] = str(tmp_path / "ca.pem")
    heard = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=180, check=False)
    # What it answers is no model to embed with.
    assert "CERTIFICATE" not in heard.stderr
    assert command != "models" or heard.stdout.startswith("a-model")
