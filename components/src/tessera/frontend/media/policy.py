"""What may be fetched, from where, and how much of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

import idna
import msgspec

from tessera.settings import MIB, POSITIVE, Setting

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


class ImageLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How large an image may be, and all images of a request together, however they come."""

    max_bytes: Annotated[
        int, Setting(flag="--max-file-size-mb", unit=MIB, check=POSITIVE, help="file size of one image")
    ] = 50 << 20
    max_request_bytes: Annotated[
        int,
        Setting(flag="--max-media-mb", unit=MIB, check=POSITIVE, help="file size of all images of a request"),
    ] = 256 << 20
    max_pixels: Annotated[
        int, Setting(flag="--max-image-pixels", check=POSITIVE, help="pixels of one image")
    ] = 100_000_000


def _no_directory(flag: str, path: Path) -> str | None:
    return None if path.is_dir() else f"{flag} {path}: no such directory"


def _no_domains(flag: str, domains: Iterable[str]) -> str | None:
    for domain in domains:
        try:
            _canonical(domain)
        except idna.IDNAError as error:
            return f"{flag} {domain}: not a domain: {error}"
    return None


def _no_proxy(flag: str, url: str) -> str | None:
    parts = urlsplit(url)
    if parts.scheme in ("http", "https") and parts.hostname:
        return None
    # It may hold a password, so it is not repeated.
    return f"{flag} must be an http or https URL with a host"


class MediaPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Rules for every image that a request names instead of carrying.

    ``timeout`` and ``connect_timeout`` are seconds, the first for a whole fetch with its redirects. A name
    in ``allowed_domains`` is that host alone, or with a leading ``*.`` every host below it; an empty list
    allows all that is not blocked. A name in ``blocked_domains`` blocks the hosts below it as well.
    ``allow_private`` lets fetches reach this host and private networks. Without ``allowed_local_path`` no
    local file is served. ``proxy`` is the URL of an HTTP proxy for all fetches: it resolves names, so that
    only addresses written in URLs can be judged here.
    """

    allowed_local_path: Annotated[
        Path | None,
        Setting(
            flag="--allowed-local-media-path",
            check=_no_directory,
            help="file:// URLs below it are served; none by default",
        ),
    ] = None
    allowed_domains: Annotated[
        frozenset[str],
        Setting(
            flag="--allowed-media-domains",
            metavar="DOMAIN",
            check=_no_domains,
            help="image URLs may point only to these",
        ),
    ] = frozenset()
    blocked_domains: Annotated[
        frozenset[str],
        Setting(
            flag="--blocked-media-domains",
            metavar="DOMAIN",
            check=_no_domains,
            help="image URLs may not point to these",
        ),
    ] = frozenset()
    allow_private: Annotated[
        bool,
        Setting(flag="--allow-private-media", help="let image URLs reach loopback and private addresses"),
    ] = False
    timeout: Annotated[
        float, Setting(flag="--media-timeout-seconds", check=POSITIVE, help="time to fetch one image")
    ] = 10.0
    proxy: Annotated[
        str | None,
        Setting(
            flag="--media-proxy",
            metavar="URL",
            check=_no_proxy,
            help="fetch image URLs through this HTTP proxy, which then resolves names and must refuse "
            "private addresses itself; proxies in the environment are never used",
        ),
    ] = None
    connect_timeout: float = 3.0
    max_redirects: int = 3
    max_fetches: int = 64

    def domain_refusal(self, host: str) -> str | None:
        """Why this host, in ASCII as a URL is sent, may not be asked at all, or None."""
        host = host.lower().rstrip(".")
        if any(_below(host, domain) or host == _canonical(domain) for domain in self.blocked_domains):
            return "its domain is blocked"
        if self.allowed_domains and not any(
            _below(host, domain) if domain.startswith("*.") else host == _canonical(domain)
            for domain in self.allowed_domains
        ):
            return "its domain is not among the allowed ones"
        return None

    def address_refusal(self, address: str) -> str | None:
        """Why no connection may be made to this IP address, or None."""
        return None if self.allow_private else refusal(address)

    def host_refusal(self, host: str) -> str | None:
        """Why a host that a proxy would connect to may not be asked for, as far as its name tells."""
        host = host.lower().rstrip(".")
        if self.allow_private or self.proxy is None:
            return None
        if host == "localhost" or host.endswith((".localhost", ".local", ".internal")):
            return "private"
        try:
            ip_address(host.partition("%")[0])
        except ValueError:
            # A resolver may also read 0x7f.1 or 2130706433 as an address.
            return "not a host name" if _NUMERIC.fullmatch(host) else None
        return refusal(host)


_NUMERIC: Final = re.compile(r"(0x[0-9a-f]*|[0-9]+)(\.(0x[0-9a-f]*|[0-9]+))*")


def _canonical(domain: str) -> str:
    """In ASCII: a name in other letters is that of its A-labels (RFC 5890)."""
    name = domain.lower().removeprefix("*.").strip(".")
    return name if name.isascii() else idna.encode(name, uts46=True).decode("ascii")


def _below(host: str, domain: str) -> bool:
    return host.endswith(f".{_canonical(domain)}")


_REFUSED: Final[tuple[tuple[Network, str], ...]] = tuple(
    (ip_network(network), why)
    for network, why in (
        ("0.0.0.0/8", "unspecified"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "shared (CGNAT)"),
        ("127.0.0.0/8", "loopback"),
        ("168.63.129.16/32", "metadata"),
        ("169.254.0.0/16", "link-local"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "reserved"),
        ("192.0.2.0/24", "documentation"),
        ("192.88.99.0/24", "reserved"),
        ("192.168.0.0/16", "private"),
        ("198.18.0.0/15", "benchmarking"),
        ("198.51.100.0/24", "documentation"),
        ("203.0.113.0/24", "documentation"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved"),
        ("::/128", "unspecified"),
        ("::1/128", "loopback"),
        ("64:ff9b:1::/48", "private"),
        ("100::/64", "reserved"),
        ("2001:db8::/32", "documentation"),
        ("3fff::/20", "documentation"),
        ("5f00::/16", "reserved"),
        ("fc00::/7", "private"),
        ("fe80::/10", "link-local"),
        ("fec0::/10", "private"),
        ("ff00::/8", "multicast"),
    )
)
"""168.63.129.16 is a cloud's metadata address outside the private ranges; the others', 169.254.169.254 and
fd00:ec2::254, lie in refused ranges."""

_NAT64: Final = IPv6Network("64:ff9b::/96")
_COMPATIBLE: Final = IPv6Network("::/96")
_ISATAP: Final = (0x00005EFE, 0x02005EFE)


def refusal(text: str) -> str | None:
    """Why an address is not a public unicast one, or None if it is.

    IPv6 forms that stand for an IPv4 address are judged by that address as well. What is neither in a
    listed range nor called global by the registries is refused, too.
    """
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return "not an IP address"
    for embedded in _embedded(address):
        if (why := refusal(str(embedded))) is not None:
            return why
    for network, why in _REFUSED:
        if address.version == network.version and address in network:
            return why
    if isinstance(address, IPv6Address) and (address.ipv4_mapped or address in _NAT64 or address.sixtofour):
        return None
    return None if address.is_global and not address.is_reserved else "reserved"


def _embedded(address: Address) -> list[IPv4Address]:
    """IPv4 addresses that traffic to this IPv6 address ends at or passes through."""
    if isinstance(address, IPv4Address):
        return []
    low = int(address) & 0xFFFFFFFF
    found = [part for part in (address.ipv4_mapped, address.sixtofour) if part is not None]
    if address.teredo is not None:
        found += address.teredo
    elif address in _NAT64 or (address in _COMPATIBLE and int(address) > 1):
        found.append(IPv4Address(low))
    if int(address) >> 32 & 0xFFFFFFFF in _ISATAP:
        found.append(IPv4Address(low))
    return found
