"""API keys: reading them, and recognising the one a request carries."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from starlette.types import Message, Receive, Scope, Send

from tessera.errors import ConfigError
from tessera.frontend.admission.room import Admission
from tessera.frontend.exchange import Exchange, exchange_of
from tessera.frontend.http.auth import Authenticator, read_keys
from tessera.frontend.http.middleware import RequestMiddleware
from tessera.frontend.http.tls import Certificate
from tessera.frontend.metrics import FrontendMetrics

ONE, TWO = "sk-one-0123456789", "sk-two-0123456789"


def test_keys_from_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# the first team\n{ONE} team-a\n\n{TWO}\n")
    keys = read_keys(file, "sk-three-0123456789 ci, sk-four-0123456789")
    assert [key.name for key in keys] == ["team-a", "key-2", "ci", "key-4"]
    assert ONE not in repr(keys)
    authenticator = Authenticator(keys)
    for header in (f"Bearer {TWO}", f"bearer {TWO}", f"BEARER  {TWO} "):
        assert authenticator.name_of({b"authorization": header.encode()}) == "key-2"
    assert authenticator.name_of({b"x-api-key": ONE.encode()}) == "team-a"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer wrong")],
        [(b"authorization", f"Basic {ONE}".encode())],
        [(b"authorization", ONE.encode())],
        [(b"authorization", f"Bearer {ONE}x".encode())],
        [(b"authorization", f"Bearer {ONE[:-1]}".encode())],
        [(b"authorization", b"Bearer \xff\xfe")],
        [(b"authorization", b"Bearer wrong"), (b"authorization", f"Bearer {ONE}".encode())],
    ],
)
def test_what_opens_nothing(headers: list[tuple[bytes, bytes]]) -> None:
    exchange = Exchange.open({"path": "/", "method": "POST", "headers": headers})
    assert Authenticator(read_keys(None, ONE)).name_of(exchange.headers) is None


async def test_without_keys_everybody_is_anonymous() -> None:
    callers: list[tuple[str, str]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        callers.append((exchange.key, exchange.client))

    admission = Admission(max_requests=10, max_response_bytes=1 << 20)
    gate = RequestMiddleware(app, keys=None, limiter=None, admission=admission, metrics=FrontendMetrics())
    for headers in ([], [(b"authorization", f"Bearer {ONE}".encode())]):
        scope = {"type": "http", "method": "POST", "path": "/v1/embeddings", "headers": headers}
        await gate(scope, receive, send)
    assert callers == [("anonymous", "")] * 2


async def receive() -> Message:
    raise AssertionError("there is no body")


async def send(message: Message) -> None:
    raise AssertionError("nothing is answered")


@pytest.mark.parametrize(
    "text", ["", "\n\n", "# only a comment", "short", f"{ONE} name more", "schlüssel-0123456789"]
)
def test_sources_that_would_leave_the_service_open_or_half_closed(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text, "utf-8")
    with pytest.raises(ConfigError) as caught:
        read_keys(file, None)
    assert ONE not in str(caught.value)
    with pytest.raises(ConfigError):
        read_keys(tmp_path / "missing", None)


@pytest.mark.parametrize("text", ["", " , ", f"{ONE},{ONE}", f"{ONE} a,{TWO} a"])
def test_environments_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_keys(None, text)
    assert ONE not in str(caught.value)


def test_what_is_no_regular_file_is_refused_unread(tmp_path: Path) -> None:
    """A FIFO would be waited for without end, and a device read until memory ends."""
    os.mkfifo(fifo := tmp_path / "keys")
    for file in (fifo, Path("/dev/zero")):
        with pytest.raises(ConfigError, match=r"--api-keys-file .* is no regular file"):
            read_keys(file, None)
        with pytest.raises(ConfigError, match=r"--tls-cert.* is no regular file"):
            Certificate(file, file)
