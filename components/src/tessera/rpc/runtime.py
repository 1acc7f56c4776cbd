"""One process's membership in the Dynamo deployment."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from tessera.errors import ConfigError, DiscoveryLost
from tessera.rpc.discovery import until_wiped
from tessera.settings import DiscoveryBackend, Namespace, RequestPlane
from tessera.tasks import KEEPER


def send_at_once() -> None:
    """Turn Nagle's algorithm off on every TCP socket of this process and on all that will be accepted.

    The runtime acknowledges each call with four bytes and leaves the algorithm on where it does so. The
    second of two calls in quick succession then waits for the kernel of the caller to confirm the first,
    which takes it 40 ms. Linux hands the option on from a listening socket to what it accepts.
    """
    # Twice: what was accepted while the listening sockets had their turn is listed the second time.
    for _ in range(2):
        for each in own_sockets():
            with each:
                if each.proto == socket.IPPROTO_TCP:
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def own_sockets() -> Iterator[socket.socket]:
    """Every socket of this process under a descriptor of its own, for the caller to close."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(descriptor))
        except OSError:
            continue  # closed meanwhile
        try:
            yield socket.socket(fileno=copy)
        except OSError:
            os.close(copy)


_ENVIRONMENT_DEFAULTS = {
    # The field filters silence lines for each call. They have to name a field: the runtime puts the bare
    # target back at INFO whatever the level is. The endpoint's only warning is that an instance which
    # left discovery on its own, before its work was finished, cannot be removed from it again; the ingress
    # reports each answer that no caller waits for now, the egress of each call to a worker that is gone,
    # which comes back to the caller as an error anyway.
    "DYN_LOG": (
        "warn,dynamo_runtime::component::endpoint=error"
        ",dynamo_runtime::pipeline::network::ingress::push_handler=off"
        # An answer that no caller waits for, as of one that has hung up: 264 lines of 20,000 hang-ups.
        ",_core=off"
        ",dynamo_runtime::pipeline::network::egress=error"
        ",request_span[{request.outcome}]=off,request_span[{cancellation.signal}]=off"
    ),
    # Without these the runtime binds and advertises the first routable interface.
    "DYN_TCP_RPC_HOST": "127.0.0.1",
    "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
    "DYN_SYSTEM_HOST": "127.0.0.1",
    # One page scan is larger than the runtime's 32 MiB; the frontend's own body limit comes first.
    "DYN_TCP_MAX_MESSAGE_SIZE": str(256 << 20),
    # The runtime's ten seconds end every process of a service whose etcd is restarted. A dead worker stays
    # listed for longer with this, but is found out by its silence and not by its lease.
    "ETCD_LEASE_TTL": "30",
    # The runtime starts a thread a core. They wake each other for work that one does at less cost: a call
    # alone takes 1.18 ms of processor time on both sides together with one thread, 1.22 with two and 1.36
    # with sixteen, one of 64 at once 0.050, 0.063 and 0.055; each takes 0.8 GB of images a second.
    "DYN_RUNTIME_NUM_WORKER_THREADS": "1",
}


def set_environment_defaults(*, json_log: bool = False) -> None:
    """Give Dynamo's own settings the defaults that fit one machine; what is set already stays.

    ``json_log`` makes its lines JSON objects. Call it in ``main``, before the first ``Runtime``: Dynamo reads
    them once.
    """
    if json_log:
        os.environ.setdefault("DYN_LOGGING_JSONL", "1")
    for name, value in _ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    if not sys.stderr.isatty():
        os.environ.setdefault("DYN_SDK_DISABLE_ANSI_LOGGING", "1")


class RpcSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``discovery_backend`` and ``request_plane`` take Dynamo's own values."""

    namespace: Namespace = "tessera"
    discovery_backend: DiscoveryBackend = "file"
    request_plane: RequestPlane = "tcp"


class Runtime:
    """Owns the ``DistributedRuntime`` of this process. Belongs to the event loop that created it."""

    def __init__(self, config: RpcSettings) -> None:
        self.config = config
        with _quiet_stderr():
            # Imported here because the module reads the environment, its log level above all, on loading.
            from dynamo.runtime import DistributedRuntime
        try:
            self._runtime: Any = DistributedRuntime(
                asyncio.get_running_loop(), config.discovery_backend, config.request_plane
            )
        except Exception as error:
            planes = f"discovery {config.discovery_backend!r}, request plane {config.request_plane!r}"
            raise ConfigError(f"cannot join the Dynamo deployment ({planes}): {error}") from error
        self._endpoints: dict[str, Any] = {}
        self._ready = False
        self._runs = False
        KEEPER.on_change = self._show_health
        # No process serves it; see ``_ended``.
        self._nobody = self.address(f"nobody-{uuid.uuid4().hex}")
        self.endpoint(self._nobody)

    def address(self, component: str, endpoint: str = "generate") -> str:
        return f"{self.config.namespace}.{component}.{endpoint}"

    def endpoint(self, address: str) -> Any:
        """The Dynamo endpoint at ``namespace.component.endpoint`` or ``dyn://namespace.component.endpoint``.

        The first time it is made. Over NATS the runtime waits for its own threads meanwhile and keeps the
        interpreter's lock; when they want that lock, to report how a call or a registration went, neither
        side ever goes on. So a new one is refused with ``ConfigError`` there once anything runs in this
        runtime: 4 of 4 frontends froze to which two models were added under load.
        """
        path = address.removeprefix("dyn://")
        if len(path.split(".")) != 3:
            raise ConfigError(f"{address!r} is no endpoint: expected dyn://namespace.component.endpoint")
        if path not in self._endpoints:
            if self._runs and self.config.request_plane == "nats":
                raise ConfigError(f"{address}: over NATS a process finds new workers after a restart only")
            self._endpoints[path] = self._runtime.endpoint(path)
        return self._endpoints[path]

    async def follow(self, address: str) -> Any:
        """The Dynamo client that follows an endpoint's instances."""
        endpoint = self.endpoint(address)
        self._runs = True
        return await endpoint.client()

    def set_ready(self, ready: bool) -> None:
        """Answer ``/health`` and ``/live`` on the runtime's system port so, unless a loop keeps failing."""
        self._ready = ready
        self._show_health(KEEPER.trouble)

    def _show_health(self, trouble: str | None) -> None:
        self._runtime.set_health_status(self._ready and trouble is None)

    async def lost(self) -> DiscoveryLost:
        """Wait until discovery has lost this process for good; cancel it before ``shutdown``.

        The runtime ends by itself when its lease in etcd has run out: it serves nothing, hears of no
        instance, and registers nothing any more. A second one cannot take its place in this process, because
        the first keeps its ports. With file discovery it goes deaf when the directory is removed, and has no
        lease; asking would cost two of the 128 inotify instances that Linux gives a user.
        """
        if self.config.discovery_backend == "file":
            return DiscoveryLost(f"the discovery directory {await until_wiped()} has been removed")
        await self._ended()
        return DiscoveryLost("the lease in discovery has run out and cannot be renewed")

    async def _ended(self) -> None:
        # Waiting for an instance of what no process serves ends with the runtime alone, by an error.
        with suppress(Exception):
            await (await self.follow(self._nobody)).wait_for_instances()

    def shutdown(self) -> None:
        self._runtime.shutdown()


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Keeps out the banners that the runtime prints about field filters; errors are raised, not printed.

    Its warning that they cost speed was checked: calls per second are the same with the filter as with
    the lines it silences, within the noise.
    """
    sys.stderr.flush()
    saved, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(sink)
