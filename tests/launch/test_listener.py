"""Who listens on a port, and which addresses are this machine's."""

from __future__ import annotations

import socket
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from tessera.launch.listener import has_address, in_use, listens
from tessera.terminal import place_of
from tests.e2e.service import free_ports

LISTEN = """
import socket, sys
listening = socket.create_server((sys.argv[1], int(sys.argv[2])), family=int(sys.argv[3]))
print("listening", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)], ids=["IPv4", "IPv6"]
)
@pytest.mark.parametrize(("name", "said"), [([], "python"), (["tessera.frontend"], "a Tessera")])
def test_what_listens_is_named(host: str, family: int, name: list[str], said: str) -> None:
    if not has_address(host):
        pytest.skip("this machine has no IPv6")
    (port,) = free_ports(1)
    assert not listens(host, port)
    process = subprocess.Popen(
        [sys.executable, "-c", LISTEN, host, str(port), str(int(family)), *name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"listening\n"
        assert listens(host, port)
        found = in_use(f"{host}:{port}", port)
        assert found.startswith(f"something listens on {host}:{port} already: {said}")
        assert found.endswith(f" with pid {process.pid}")
    finally:
        process.communicate()


def test_what_cannot_be_looked_at_is_not_named() -> None:
    (port,) = free_ports(1)
    assert in_use("port 5", port) == "something listens on port 5 already"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost", "nobody.invalid"])
def test_an_address_may_be_this_machines(host: str) -> None:
    assert has_address(host)


def test_an_address_of_another_machine_is_none_of_this() -> None:
    # Kept for documentation (RFC 5737).
    assert not has_address("192.0.2.1")


@pytest.mark.parametrize(
    ("host", "place"), [("127.0.0.1", "127.0.0.1:80"), ("::1", "[::1]:80"), ("localhost", "localhost:80")]
)
def test_a_place_is_written_as_urls_have_it(host: str, place: str) -> None:
    assert place_of(host, 80) == place
    url = urlsplit(f"http://{place}/")
    assert (url.hostname, url.port) == (host, 80)
