"""The gRPC port of a service with several frontends, by TLS: all of them answer on it, whichever ends."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from tests.authority import Authority, needs_openssl
from tests.e2e.service import ROOT, free_ports, launch
from tests.waiting import wait_until

pytestmark = [pytest.mark.service, pytest.mark.kserve, needs_openssl]

FRONTENDS = 2


def vector(port: int, root: Path) -> np.ndarray:
    """Over a connection of its own."""
    client = tritonclient.grpc.InferenceServerClient(
        f"localhost:{port}",
        ssl=True,
        root_certificates=str(root),
        channel_args=[("grpc.use_local_subchannel_pool", 1)],
    )
    with client:
        tensor = tritonclient.grpc.InferInput("input_ids", [1, 2], "INT64")
        tensor.set_data_from_numpy(np.array([[1, 5]]))
        return client.infer("router", [tensor], client_timeout=60).as_numpy("pooled")


def serial(port: int, authority: Authority) -> str:
    """Of the certificate that a new connection gets."""
    with (
        socket.create_connection(("localhost", port), timeout=60) as plain,
        authority.client.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        return ssl.DER_cert_to_PEM_cert(secure.getpeercert(binary_form=True) or b"")


def test_frontends_share_the_port_by_tls(checkpoint: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.sign("service")
    (port,) = free_ports(1)
    environment = {
        "TESSERA_TLS_CERT": str(cert),
        "TESSERA_TLS_KEY": str(key),
        "TESSERA_FRONTEND_ARGS": f"--grpc-port {port}",
    }
    with launch(
        "agg.sh", checkpoint, tmp_path / "log", workers=1, frontends=FRONTENDS, environment=environment
    ) as running:
        log = running.log.read_text()
        assert log.count("listening on grpcs://") == FRONTENDS
        exact = vector(port, tmp_path / "ca.pem")
        for _ in range(20):
            assert np.allclose(vector(port, tmp_path / "ca.pem"), exact, atol=1e-6)
        routes = "/inference.GRPCInferenceService/ModelInfer"
        pids = {
            line.split("[")[1].split("]")[0]
            for line in running.log.read_text().splitlines()
            if routes in line
        }
        assert len(pids) == FRONTENDS, "the system gave all connections to one of them"
        # A renewed certificate is used for new connections.
        before = serial(port, authority)
        other, other_key = authority.sign("renewed")
        key.write_bytes(other_key.read_bytes())
        cert.write_bytes(other.read_bytes())
        # Not at once: the files are looked at every two seconds.
        wait_until(lambda: serial(port, authority) != before)
        # One that is killed takes its connections with it, and no others.
        os.kill(running.pids_in_order(FRONTENDS + 1)[0], signal.SIGKILL)
        deadline = time.monotonic() + 60
        good = 0
        while good < 20:
            try:
                assert np.allclose(vector(port, tmp_path / "ca.pem"), exact, atol=1e-6)
                good += 1
            except InferenceServerException:
                # It was in the queue of the one that has ended.
                assert time.monotonic() < deadline
                good = 0


@pytest.mark.usefixtures("forks")
def test_another_services_port_is_refused(checkpoint: Path, tmp_path: Path) -> None:

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "tessera.cli", "serve", str(checkpoint), "--grpc-port", str(port)]
        command += ["--port", str(free_ports(1)[0])]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert ran.returncode != 0
    assert f"--grpc-port {port}: something listens on" in ran.stderr + ran.stdout
