"""TLS of the frontends' port: the certificate, its renewal, and connections over it."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, cast

import msgspec

from tessera.errors import ConfigError
from tessera.settings import Setting
from tessera.small_files import read_regular
from tessera.tasks import KEEPER

log = logging.getLogger(__name__)

PASSWORD_VARIABLE: Final = "TESSERA_TLS_KEY_PASSWORD"

# A renewed certificate is used after this time at most.
_LOOK_SECONDS: Final = 2.0
# For a client's own end of TLS, once it has all that was sent: many look at an idle connection only when they
# want to use it again, and a drain would wait for them.
_GOODBYE_SECONDS: Final = 1.0
PROGRESS_BYTES: Final = 16 << 10
"""A client that reads less than this in its time counts as one that does not read."""
# Ours are the clocks of a connection that is being closed.
_NEVER_SECONDS: Final = 86_400.0


class TlsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the certificate is; without one the port is plain HTTP."""

    cert: Annotated[
        Path | None,
        Setting(
            flag="--tls-cert",
            metavar="FILE",
            help="answer by TLS, and by nothing else, with this certificate: PEM, with the chain behind it",
            more="It is read again when it changes. A handshake has `--header-timeout-seconds`",
        ),
    ] = None
    key: Annotated[
        Path | None,
        Setting(
            flag="--tls-key",
            metavar="FILE",
            help="its private key: PEM; by default it is in the file of the certificate",
            more=f"`{PASSWORD_VARIABLE}` holds the password of an encrypted one",
        ),
    ] = None


class _Encrypted(Exception):
    """The key has a password, and none is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A chain and its key, in PEM, that were found good together; ``until`` is the end of their validity."""

    context: ssl.SSLContext
    until: str
    chain: bytes
    key: bytes

    @property
    def encrypted(self) -> bool:
        return b"ENCRYPTED" in self.key


class Certificate:
    """Holds the pair of certificate and key that new connections get, on whichever port.

    ``accepted`` changes when the files do and are good. Nobody else reads them: what was judged is what is
    served, whatever is written to the files meanwhile.
    """

    def __init__(self, cert: Path, key: Path, password: str | None = None) -> None:
        """Raises ``ConfigError`` for files that cannot be used, naming the flag and the file."""
        self._cert, self._key, self._password = cert, key, password
        self._seen = self._signature()
        self.accepted = self._load()
        log.info("TLS with the certificate %s, valid until %s", cert, self.accepted.until)

    @classmethod
    def of(cls, settings: TlsSettings, password: str | None = None) -> Certificate | None:
        """None without settings; raises ``ConfigError``."""
        if settings.cert is None:
            if settings.key is not None:
                raise ConfigError(f"--tls-key {settings.key}: there is no --tls-cert for it")
            return None
        return cls(settings.cert, settings.key or settings.cert, password)

    def watch(self) -> asyncio.Task[None]:
        """Read the files again whenever they have changed, until the task is cancelled."""
        return KEEPER.start("certificate", self._look, every=_LOOK_SECONDS)

    async def _look(self) -> None:
        """Read the files again if they have changed; errors keep what there is."""
        if (seen := self._signature()) == self._seen:
            return
        try:
            self.accepted = self._load()
            log.info("TLS with a renewed certificate, valid until %s", self.accepted.until)
        except ConfigError as error:
            until = self.accepted.until
            log.error("the certificate stays as it was, valid until %s: %s", until, error.message)
        # One that is half written now changes again.
        self._seen = seen

    def _signature(self) -> tuple[object, ...]:
        # Of what links lead to: cert-manager's files are links that it moves.
        found = []
        for path in (self._cert, self._key):
            try:
                stat = path.stat()
                found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
            except OSError as error:
                found.append((error.errno or 0, 0, 0))
        return tuple(found)

    def _load(self) -> Accepted:
        cert, key = f"--tls-cert {self._cert}", f"--tls-key {self._key}"
        chain, private = _read(self._cert, cert), _read(self._key, key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])

        def password() -> str:
            # OpenSSL would ask whoever sits at the terminal.
            if self._password is None:
                raise _Encrypted
            return self._password

        try:
            with _file_of(chain) as chain_path, _file_of(private) as key_path:
                context.load_cert_chain(chain_path, key_path, password)
        except _Encrypted:
            said = f"{key}: the key is encrypted, and {PASSWORD_VARIABLE} does not hold its password"
            raise ConfigError(said) from None
        except ssl.SSLError as error:
            match error.reason:
                case "KEY_VALUES_MISMATCH":
                    said = f"{key}: this is not the key of the certificate {self._cert}"
                case _ if b"CERTIFICATE-----" in chain and self._password is not None:
                    said = f"{key}: no private key in PEM, or {PASSWORD_VARIABLE} is not its password"
                case _ if b"CERTIFICATE-----" in chain:
                    said = f"{key}: no private key in PEM"
                case _:
                    said = f"{cert}: no certificate in PEM"
            raise ConfigError(said) from error
        try:
            until = _tried(context, chain)
        except (ssl.SSLError, ValueError) as error:
            why = getattr(error, "verify_message", "") or str(error)
            raise ConfigError(f"{cert}: clients would refuse it: {why}") from error
        return Accepted(context=context, until=until, chain=chain, key=private)


def _read(path: Path, flag: str) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise ConfigError(f"{flag}: {error.strerror}") from error


@contextmanager
def _file_of(content: bytes) -> Iterator[str]:
    """Give the path of a file in memory: OpenSSL reads a chain and its key from nothing else."""
    number = os.memfd_create("tessera-tls")
    try:
        with open(number, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{number}"
    finally:
        os.close(number)


def _tried(context: ssl.SSLContext, chain: bytes) -> str:
    """Connect a client in memory that trusts the certificate: until when it is valid.

    The client finds what none would accept: one that has expired or is not valid yet, or is not for servers.
    Whom real clients trust cannot be known here. Raises ``ssl.SSLError``.
    """
    judge = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    judge.check_hostname = False
    judge.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    judge.load_verify_locations(cadata=_certificates(chain))
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = judge.wrap_bio(down, up)
    server = context.wrap_bio(up, down, server_side=True)
    for end in (client, server, client):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    found = client.getpeercert() or {}
    return str(found["notAfter"])


def _certificates(chain: bytes) -> str:
    """The certificates of a PEM file, which may hold the key and words as well."""
    text = chain.decode("ascii", "replace")
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    blocks = [block.partition(end)[0] for block in text.split(begin)[1:]]
    return "".join(f"{begin}{block}{end}\n" for block in blocks)


class _Keeping(asyncio.Protocol):
    """Keeps what comes until another protocol is there."""

    def __init__(self) -> None:
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data


class _Waiting(_Keeping):
    """Keeps what comes until TLS takes it: uvloop reads before anybody can tell it not to."""

    def hand_over(self, raw: asyncio.Transport) -> None:
        """Give it to the protocol that took this one's place, if the connection still has one."""
        if raw.is_closing():
            return
        protocol, left = cast(asyncio.BufferedProtocol, raw.get_protocol()), memoryview(self._data)
        while left:
            space = memoryview(protocol.get_buffer(len(left)))
            count = min(len(space), len(left))
            space[:count] = left[:count]
            protocol.buffer_updated(count)
            left = left[count:]


class _Early(_Keeping):
    """Keeps what a client sends right behind its handshake, until the connection's own protocol is there."""

    _lost: Exception | None = None
    _gone = False

    def connection_lost(self, error: Exception | None) -> None:
        self._gone, self._lost = True, error

    def hand_over(self, transport: asyncio.Transport, protocol: asyncio.Protocol) -> None:
        if not self._gone:
            transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._data:
            protocol.data_received(self._data)
        if self._gone:
            protocol.connection_lost(self._lost)


async def shake_hands(
    connection: Any,
    context: ssl.SSLContext,
    make: Callable[[], asyncio.Protocol],
    *,
    seconds: float,
    write_seconds: float,
) -> None:
    """Serve an accepted socket by TLS; ``make`` gives its protocol once the handshake is done.

    Raises ``OSError`` for a client that has gone, does not speak TLS, or takes longer than ``seconds``.
    """
    loop = asyncio.get_running_loop()
    raw, waiting = await loop.connect_accepted_socket(_Waiting, connection)
    if raw.is_closing():
        raise ConnectionResetError("the client has gone")
    early = _Early()
    starting = asyncio.ensure_future(
        loop.start_tls(
            raw,
            early,
            context,
            server_side=True,
            ssl_handshake_timeout=seconds,
            ssl_shutdown_timeout=_NEVER_SECONDS,
        )
    )
    try:
        # Once it has begun: what it has put into the loop's queue by then comes first.
        await asyncio.sleep(0)
        loop.call_soon(waiting.hand_over, raw)
        secured = await starting
    except asyncio.CancelledError:
        starting.cancel()
        raise
    assert secured is not None
    transport = TlsTransport(secured, raw, loop, seconds=write_seconds)
    early.hand_over(cast(asyncio.Transport, transport), make())


class TlsTransport:
    """A transport over TLS that is bounded as a plain one is.

    The one below encrypts at once whatever it is given and leaves it to the socket's, so that neither says
    how much waits, and nobody is told to wait: the sum of both is looked at here. Closing sends what waits
    and says so by TLS, and does not wait longer than a moment for the client to say the same.
    """

    def __init__(
        self,
        secured: asyncio.Transport,
        raw: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        *,
        seconds: float,
    ) -> None:
        self._secured, self._raw, self._loop = secured, raw, loop
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._closing = self._empty = False
        self._written = 0
        # What the client had taken when it last took some, and when that was.
        self._taken, self._since = 0, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._secured, name)

    def get_write_buffer_size(self) -> int:
        return 0 if self._raw.is_closing() else self._size()

    def _size(self) -> int:
        return self._secured.get_write_buffer_size() + self._raw.get_write_buffer_size()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._secured.write(data)
        self._written += len(data)
        self._watch()

    def writelines(self, parts: Iterable[bytes]) -> None:
        self.write(b"".join(parts))

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._secured.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._watch()

    def _watch(self) -> None:
        if self._timer is not None or self._raw.is_closing():
            return
        if self._closing or self._size():
            self._taken, self._since = self._written - self._size(), self._loop.time()
            self._arm()

    def _arm(self) -> None:
        seconds = min(_GOODBYE_SECONDS, self._seconds) if self._closing else self._seconds
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._raw.is_closing():
            return
        if not (size := self._size()):
            if self._closing and self._empty:
                self._secured.abort()
            elif self._closing:
                self._empty = True
                self._arm()
            return
        taken, now = self._written - size, self._loop.time()
        if taken >= self._taken + PROGRESS_BYTES:
            self._taken, self._since = taken, now
        elif now - self._since >= 0.9 * self._seconds:
            self._secured.abort()
            return
        self._arm()
