"""One process's membership in the Dynamo deployment."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from tessera.errors import ConfigError

_ENVIRONMENT_DEFAULTS = {
    # The field filters silence lines for each call. They have to name a field: the runtime puts the bare
    # target back at INFO whatever the level is. The endpoint's only warning is that an instance which
    # left discovery on its own, before its work was finished, cannot be removed from it again; the ingress
    # warns of each answer that nobody waits for any more, the egress of each call to a worker that is gone,
    # which comes back to the caller as an error anyway.
    "DYN_LOG": (
        "warn,dynamo_runtime::component::endpoint=error"
        ",dynamo_runtime::pipeline::network::ingress::push_handler=error"
        ",dynamo_runtime::pipeline::network::egress=error"
        ",request_span[{request.outcome}]=off,request_span[{cancellation.signal}]=off"
    ),
    # Without these the runtime binds and advertises the first routable interface.
    "DYN_TCP_RPC_HOST": "127.0.0.1",
    "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
    "DYN_SYSTEM_HOST": "127.0.0.1",
    # One page scan is larger than the runtime's 32 MiB; the frontend's own body limit comes first.
    "DYN_TCP_MAX_MESSAGE_SIZE": str(256 << 20),
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


class RpcConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``discovery_backend`` and ``request_plane`` take Dynamo's own values."""

    namespace: str = "tessera"
    discovery_backend: str = "file"
    request_plane: str = "tcp"


class Runtime:
    """Owns the ``DistributedRuntime`` of this process. Belongs to the event loop that created it."""

    def __init__(self, config: RpcConfig) -> None:
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

    def address(self, component: str) -> str:
        return f"{self.config.namespace}.{component}.generate"

    def endpoint(self, address: str) -> Any:
        """The Dynamo endpoint at ``namespace.component.endpoint`` or ``dyn://namespace.component.endpoint``."""
        path = address.removeprefix("dyn://")
        if len(path.split(".")) != 3:
            raise ConfigError(f"{address!r} is no endpoint: expected dyn://namespace.component.endpoint")
        return self._runtime.endpoint(path)

    def context(self) -> Any:
        """A new call's context, through which the caller can stop it."""
        from dynamo.runtime import Context

        return Context()

    def set_ready(self, ready: bool) -> None:
        """What ``/health`` on the runtime's system port answers."""
        self._runtime.set_health_status(ready)

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
