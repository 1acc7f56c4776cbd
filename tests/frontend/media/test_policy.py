"""Which hosts and addresses may be asked, and that the address judged is the address used."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpcore2
import pytest

from tessera.errors import ConfigError, MediaFetchError
from tessera.frontend.media import MediaBudget, MediaPolicy
from tessera.frontend.media.fetch import AddressRefused, Fetcher, SystemResolver, VettedBackend
from tessera.frontend.media.policy import refusal
from tessera.frontend.settings import parse
from tessera.tasks import Deadline


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.255.255.254", "0.0.0.0", "10.0.0.1", "172.16.0.1", "172.31.255.255"),
        *("192.168.1.1", "169.254.169.254", "169.254.0.1", "100.64.0.1", "100.127.255.255"),
        *("192.0.0.1", "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "168.63.129.16"),
        *("224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1"),
        *("2002:7f00:1::", "2002:a9fe:a9fe::1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1"),
        *("2001:0:7f00:1::", "2001:db8::1", "100::1", "3fff::1", "5f00::1"),
        *("2606:4700::5efe:7f00:1", "not an address", ""),
    ],
)
def test_addresses_that_are_refused(address: str) -> None:
    assert refusal(address) is not None
    assert MediaPolicy().address_refusal(address) is not None
    assert MediaPolicy(allow_private=True).address_refusal(address) is None


@pytest.mark.parametrize(
    "address",
    [
        *("93.184.216.34", "8.8.8.8", "172.15.0.1", "172.32.0.1", "100.63.0.1", "100.128.0.1"),
        *(
            "2606:4700:4700::1111",
            "2a00:1450:4001::1",
            "64:ff9b::808:808",
            "::ffff:8.8.8.8",
            "2002:808:808::1",
        ),
    ],
)
def test_public_addresses(address: str) -> None:
    assert refusal(address) is None


def test_domains() -> None:
    policy = MediaPolicy(
        allowed_domains=frozenset({"Example.com", "*.cdn.net"}), blocked_domains=frozenset({"bad.cdn.net"})
    )
    for host in ("example.com", "EXAMPLE.com.", "a.cdn.net", "a.b.cdn.net"):
        assert policy.domain_refusal(host) is None
    for host in (
        "www.example.com",
        "cdn.net",
        "evilcdn.net",
        "example.com.evil.org",
        "bad.cdn.net",
        "x.bad.cdn.net",
    ):
        assert policy.domain_refusal(host) is not None
    assert MediaPolicy().domain_refusal("anything.at.all") is None


@pytest.mark.parametrize("written", ["bücher.example", "BÜCHER.example", "xn--bcher-kva.example"])
@pytest.mark.parametrize("asked", ["bücher.example", "sub.bücher.example", "sub.xn--bcher-kva.example"])
async def test_a_name_in_other_letters_is_one_name_however_it_is_written(written: str, asked: str) -> None:
    blocking = Fetcher(MediaPolicy(blocked_domains=frozenset({written})), resolver=Answers(["127.0.0.1"]))
    with pytest.raises(MediaFetchError, match="its domain is blocked"):
        await fetch(blocking, f"http://{asked}/")
    names = frozenset({written, f"*.{written}"})
    allowing = Fetcher(MediaPolicy(allowed_domains=names), resolver=Answers(["127.0.0.1"]))
    with pytest.raises(MediaFetchError, match="loopback"):
        await fetch(allowing, f"http://{asked}/")
    with pytest.raises(MediaFetchError, match="not among the allowed"):
        await fetch(allowing, "http://xn--bcher-kva.xn--zzzzzzz99.example/")


async def fetch(fetcher: Fetcher, url: str) -> bytes:
    try:
        return await fetcher.get(url, param="input", deadline=Deadline.after(60), budget=MediaBudget(1 << 20))
    finally:
        await fetcher.close()


def test_a_domain_that_is_none_is_refused_at_the_start(checkpoint: Path) -> None:
    for flag in ("--allowed-media-domains", "--blocked-media-domains"):
        with pytest.raises(ConfigError, match=rf"{flag} ü\.\.example: not a domain"):
            parse(["--model-path", str(checkpoint), flag, "good.example", "ü..example"])


class Connector(httpcore2.AsyncMockBackend):
    def __init__(self, unreachable: frozenset[str] = frozenset()) -> None:
        super().__init__([])
        self.asked: list[str] = []
        self._unreachable = unreachable

    async def connect_tcp(
        self, host: str, port: int, *args: object, **kwargs: object
    ) -> httpcore2.AsyncNetworkStream:
        self.asked.append(host)
        if host in self._unreachable:
            raise httpcore2.ConnectError("unreachable")
        return await super().connect_tcp(host, port)


class Answers:
    """A name server that changes its mind; the last answer stays."""

    def __init__(self, *answers: list[str]) -> None:
        self._answers = list(answers)
        self.asked = 0

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked += 1
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


async def test_the_judged_address_is_the_one_connected_to() -> None:
    resolver, connector = Answers(["93.184.216.34"], ["127.0.0.1"]), Connector()
    backend = VettedBackend(MediaPolicy(), resolver, connector)
    await backend.connect_tcp("rebind.example", 80, timeout=5)
    assert connector.asked == ["93.184.216.34"]
    assert resolver.asked == 1
    with pytest.raises(AddressRefused, match="loopback"):
        await backend.connect_tcp("rebind.example", 80, timeout=5)
    assert connector.asked == ["93.184.216.34"]


async def test_one_refused_address_refuses_the_name() -> None:
    connector = Connector()
    backend = VettedBackend(MediaPolicy(), Answers(["93.184.216.34", "::ffff:10.0.0.1"]), connector)
    with pytest.raises(AddressRefused, match="private"):
        await backend.connect_tcp("mixed.example", 443, timeout=5)
    assert connector.asked == []


async def test_the_next_address_is_tried() -> None:
    connector = Connector(unreachable=frozenset({"93.184.216.34"}))
    backend = VettedBackend(MediaPolicy(), Answers(["93.184.216.34", "8.8.8.8"]), connector)
    await backend.connect_tcp("two.example", 443, timeout=5)
    assert connector.asked == ["93.184.216.34", "8.8.8.8"]
    with pytest.raises(httpcore2.ConnectError):
        await VettedBackend(MediaPolicy(), Answers([]), connector).connect_tcp("none.example", 443)


async def test_numbers_that_are_addresses_are_resolved_before_they_are_judged() -> None:
    resolver = SystemResolver(threads=1)
    backend = VettedBackend(MediaPolicy(), resolver, connector := Connector())
    for host in ("2130706433", "0x7f.1", "127.1", "localhost", "::1"):
        with pytest.raises((AddressRefused, httpcore2.ConnectError)):
            await backend.connect_tcp(host, 80, timeout=5)
    assert connector.asked == []
    resolver.close()


class TlsStream(httpcore2.AsyncMockStream):
    """Records the name that a certificate would be verified against."""

    def __init__(self, names: list[str | None]) -> None:
        super().__init__([b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"])
        self._names = names

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.AsyncNetworkStream:
        self._names.append(server_hostname)
        return self


class TlsConnector(Connector):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str | None] = []

    async def connect_tcp(
        self, host: str, port: int, *args: object, **kwargs: object
    ) -> httpcore2.AsyncNetworkStream:
        self.asked.append(host)
        return TlsStream(self.names)


async def test_certificates_are_verified_against_the_name_not_the_address() -> None:
    connector = TlsConnector()
    backend = VettedBackend(MediaPolicy(), Answers(["93.184.216.34"]), connector)
    async with httpcore2.AsyncConnectionPool(network_backend=backend) as pool:
        assert (await pool.request("GET", "https://name.example/")).content == b"ok"
    assert connector.asked == ["93.184.216.34"]
    assert connector.names == ["name.example"]
