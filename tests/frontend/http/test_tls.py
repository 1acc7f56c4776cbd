"""The port by TLS: the promises of the plain one, by real clients, and its certificate."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from tessera.errors import ConfigError
from tessera.frontend.http import connection, tls
from tessera.frontend.http.connection import ConnectionLimits
from tessera.frontend.http.tls import PASSWORD_VARIABLE, Certificate, TlsSettings
from tests.authority import Authority, needs_openssl
from tests.frontend.http.test_connection import LARGE, LIMITS, Running, served
from tests.waiting import until

pytestmark = needs_openssl


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def signed(authority: Authority) -> tuple[Path, Path]:
    return authority.sign("server")


@pytest.fixture
async def running(signed: tuple[Path, Path]) -> AsyncIterator[Running]:
    async with served(LIMITS, Certificate(*signed)) as made:
        await until(lambda: made.server.started)
        yield made


async def connect(
    running: Running, authority: Authority
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("localhost", running.port, ssl=authority.client)


async def test_clients_are_answered_by_tls_with_the_whole_chain(
    signed: tuple[Path, Path], authority: Authority
) -> None:
    # A busy client may take seconds to read 64 MiB.
    async with served(ConnectionLimits(), Certificate(*signed)) as running:
        await until(lambda: running.server.started)
        url = f"https://localhost:{running.port}"
        async with httpx.AsyncClient(base_url=url, verify=authority.client) as http:
            assert (await http.get("/small")).text == "small"
            assert len((await http.get("/large")).content) == LARGE
            assert (await http.post("/echo", content=bytes(3_000_000))).text == "3000000"
            assert (await http.get("/nowhere")).status_code == 404
        async with httpx.AsyncClient(base_url=url) as stranger:
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                await stranger.get("/small")


async def test_no_handshake_is_lost_however_early_it_begins(running: Running, authority: Authority) -> None:
    def ask() -> None:
        for _ in range(100):
            with (
                socket.create_connection(("localhost", running.port)) as plain,
                authority.client.wrap_socket(plain, server_hostname="localhost") as secured,
            ):
                assert secured.version() == "TLSv1.3"

    await asyncio.to_thread(ask)


async def test_a_request_right_behind_the_handshake_is_not_lost(
    running: Running, authority: Authority
) -> None:
    def ask() -> bytes:
        with socket.create_connection(("localhost", running.port)) as plain:
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            client = authority.client.wrap_bio(incoming, outgoing, server_hostname="localhost")
            while True:
                try:
                    client.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    plain.sendall(outgoing.read())
                    incoming.write(plain.recv(65536))
            # The end of the handshake and the request in one write.
            client.write(b"GET /small HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            plain.sendall(outgoing.read())
            answer = b""
            while data := plain.recv(65536):
                incoming.write(data)
                try:
                    while part := client.read():
                        answer += part
                except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
                    continue
            return answer

    assert (await asyncio.to_thread(ask)).endswith(b"small")


async def test_what_is_no_tls_is_closed_and_leaves_nothing(running: Running, authority: Authority) -> None:
    for said in (b"GET /small HTTP/1.1\r\nhost: a\r\n\r\n", b"\x16\x03\x01" + bytes(500), b"\0" * 5000):
        reader, writer = await running.connect()
        writer.write(said)
        with suppress(ConnectionError):
            assert b"HTTP/1.1" not in await asyncio.wait_for(reader.read(), 60)
        writer.close()
    await until(lambda: not running.server.ports[0]._arriving)
    assert not running.server.server_state.connections
    reader, writer = await connect(running, authority)
    writer.write(b"GET /small HTTP/1.1\r\nhost: a\r\n\r\n")
    assert b"200 OK" in await reader.readline()
    writer.close()


async def test_a_client_that_says_nothing_is_cut_off(running: Running) -> None:
    silent = [await running.connect() for _ in range(20)]
    for reader, writer in silent:
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
    await until(lambda: not running.server.ports[0]._arriving)


async def test_handshakes_count_as_connections(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessera.frontend.http.server.max_connections", lambda: -connection.REFUSED_AT_ONCE)
    reader, writer = await running.connect()
    with suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), 60) == b""
    assert not running.server.ports[0]._arriving
    writer.close()


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"GET /small HTTP/1.1\r\n", b"HTTP/1.1 408"),
        (b"nonsense\r\n\r\n", b"HTTP/1.1 400"),
        (b"GET /small HTTP/1.1\r\nx: " + b"a" * 5000, b"HTTP/1.1 431"),
        (b"GET /small HTTP/1.1\r\n\r\n", b"HTTP/1.1 400"),
    ],
)
async def test_bad_heads_are_answered_and_closed(
    running: Running, authority: Authority, sent: bytes, answer: bytes
) -> None:
    reader, writer = await connect(running, authority)
    writer.write(sent)
    assert (await asyncio.wait_for(reader.read(), 60)).startswith(answer)
    writer.close()
    await until(lambda: not running.server.server_state.connections)


@pytest.mark.parametrize("closes", [True, False])
async def test_a_client_that_does_not_read_is_cut_off(
    running: Running, authority: Authority, closes: bool
) -> None:
    """Also after the whole answer was given to TLS, which takes it at once."""

    def ask() -> ssl.SSLSocket:
        plain = socket.create_connection(("localhost", running.port))
        secured = authority.client.wrap_socket(plain, server_hostname="localhost")
        head = "connection: close\r\n" if closes else ""
        secured.sendall(f"GET /large HTTP/1.1\r\nhost: a\r\n{head}\r\n".encode())
        return secured

    secured = await asyncio.to_thread(ask)
    await until(lambda: running.large == 1)
    await until(lambda: not running.server.server_state.connections)
    secured.close()


async def test_a_client_that_reads_slowly_gets_all_of_it(running: Running, authority: Authority) -> None:
    reader, writer = await connect(running, authority)
    writer.write(b"GET /large HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    found = 0
    # Longer than a client without progress has.
    for _ in range(15):
        await asyncio.sleep(0.1)
        found += len(await reader.read(1 << 20))
    while data := await reader.read(1 << 20):
        found += len(data)
    assert found > LARGE
    writer.close()


async def test_a_client_that_never_says_goodbye_does_not_hold_the_drain(
    signed: tuple[Path, Path], authority: Authority
) -> None:
    async with served(replace(LIMITS, keep_alive_seconds=60.0), Certificate(*signed)) as running:
        await until(lambda: running.server.started)

        def ask() -> ssl.SSLSocket:
            plain = socket.create_connection(("localhost", running.port))
            secured = authority.client.wrap_socket(plain, server_hostname="localhost")
            secured.sendall(b"GET /small HTTP/1.1\r\nhost: a\r\n\r\n")
            assert secured.recv(65536).startswith(b"HTTP/1.1 200")
            return secured

        secured = await asyncio.to_thread(ask)
        (protocol,) = running.server.server_state.connections
        protocol.shutdown()  # type: ignore[union-attr]
        await until(lambda: not running.server.server_state.connections)
        secured.close()


async def test_a_client_that_hangs_up_is_noticed(running: Running, authority: Authority) -> None:
    _, writer = await connect(running, authority)
    writer.write(b"GET /slow HTTP/1.1\r\nhost: a\r\n\r\n")
    await until(lambda: len(running.server.server_state.tasks) == 1)
    writer.transport.abort()
    await until(lambda: not running.server.server_state.connections)


async def test_a_renewed_certificate_is_used_and_a_broken_one_is_not(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "_LOOK_SECONDS", 0.05)
    folders = {}
    for name in ("one", "two", "three"):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        for target, path in zip(("tls.crt", "tls.key"), authority.sign(name), strict=True):
            (folders[name] / target).write_bytes(path.read_bytes())
    # As a volume of Kubernetes: links through one that is moved.
    (tmp_path / "data").symlink_to("one")
    for target in ("tls.crt", "tls.key"):
        (tmp_path / target).symlink_to(f"data/{target}")

    async def name_served(running: Running) -> str:
        _, writer = await connect(running, authority)
        found = writer.get_extra_info("peercert")["subject"][0][0][1]
        writer.close()
        return str(found)

    def move(name: str) -> None:
        (tmp_path / "new").symlink_to(name)
        os.replace(tmp_path / "new", tmp_path / "data")

    certificate = Certificate(tmp_path / "tls.crt", tmp_path / "tls.key")
    async with served(LIMITS, certificate) as running:
        await until(lambda: running.server.started)
        assert await name_served(running) == "one"
        before = certificate.accepted
        move("two")
        await until(lambda: certificate.accepted is not before)
        assert await name_served(running) == "two"
        (folders["three"] / "tls.key").write_text("no key")
        move("three")
        await until(lambda: "the certificate stays as it was" in caplog.text)
        assert await name_served(running) == "two"


def test_a_certificate_that_cannot_be_used_is_named(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.sign("good")
    other = authority.sign("other")[1]
    old = authority.sign("old", "-days", "-1")
    nothing = tmp_path / "nothing"
    words = tmp_path / "words"
    words.write_text("no PEM")
    for given, said in (
        ((nothing, key), f"--tls-cert {nothing}: No such file"),
        ((cert, nothing), f"--tls-key {nothing}: No such file"),
        ((cert, other), f"--tls-key {other}: this is not the key of the certificate {cert}"),
        ((words, key), f"--tls-cert {words}: no certificate in PEM"),
        ((cert, words), f"--tls-key {words}: no private key in PEM"),
        ((cert, cert), f"--tls-key {cert}: no private key in PEM"),
        (old, f"--tls-cert {old[0]}: clients would refuse it: certificate has expired"),
    ):
        with pytest.raises(ConfigError) as caught:
            Certificate(*given)
        assert said in caught.value.message
    with pytest.raises(ConfigError, match="there is no --tls-cert for it"):
        Certificate.of(TlsSettings(key=key))
    assert Certificate.of(TlsSettings()) is None


def test_an_encrypted_key_takes_its_password_by_the_environment(authority: Authority) -> None:
    cert, key = authority.sign("secret")
    encrypted = authority.encrypt(key, "open")
    assert Certificate(cert, encrypted, "open").accepted.encrypted
    with pytest.raises(ConfigError, match=f"{PASSWORD_VARIABLE} does not hold its password"):
        Certificate(cert, encrypted)
    with pytest.raises(ConfigError, match=f"or {PASSWORD_VARIABLE} is not its password"):
        Certificate(cert, encrypted, "shut")


def test_one_file_may_hold_both(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.sign("both")
    whole = tmp_path / "both.pem"
    whole.write_text(key.read_text() + cert.read_text())
    assert Certificate.of(TlsSettings(cert=whole)) is not None
