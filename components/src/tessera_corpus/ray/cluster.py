"""A Ray cluster: one that is there, or one of this command's own."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tessera import machine
from tessera.errors import ConfigError, Unavailable
from tessera.extras import missing
from tessera_corpus.ray.settings import RaySettings

LOCAL: Final = "local"

# Sockets are below it, with paths of 107 bytes at most.
_TOP: Final = "/tmp"
_PREFIX: Final = "tessera-ray-"
_LOCK: Final = "tessera.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a cluster has."""

    machines: int
    cpus: int
    cards: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """At most so many actors of each kind, and the cards of an engine: 1, or 0 where the cluster has none."""

    readers: int
    engines: int
    engines_on_host: int
    cards: int

    @classmethod
    def of(cls, resources: Resources, settings: RaySettings) -> Pools:
        """Raises ``ConfigError`` where there is no room for a reader and an engine."""
        if resources.cpus < 2:
            raise ConfigError(
                f"--ray: the cluster has {resources.cpus} CPUs; a reader and an engine need two"
            )
        engines = settings.engines or resources.cards or resources.machines
        # Actors of both kinds hold one CPU each: the readers leave the engines theirs.
        engines = min(engines, resources.cpus - 1)
        readers = min(settings.readers or resources.cpus, resources.cpus - engines)
        return cls(
            readers=readers,
            engines=engines,
            engines_on_host=-(-engines // resources.machines),
            cards=1 if resources.cards else 0,
        )


@contextmanager
def joined(settings: RaySettings) -> Iterator[Resources]:
    """While this process is part of the cluster; one that was started here ends with it.

    From the main thread: the processes of a local cluster end with the thread that started them. Raises
    ``ConfigError`` without Ray, and ``Unavailable`` where no cluster answers.
    """
    local = settings.address == LOCAL
    # Read when Ray is imported.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # A thread that still asks for blocks when this process has left would start another cluster.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    if local:
        # Processes of a run that is killed look for its head so long before they end; 60 s by default.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
        # Engines and readers as urgent as this process: with Ray's 15, whatever else is busy here leaves them
        # a thirtieth of a core, and the first row took six minutes in place of half a one.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # Has everything listen on 127.0.0.1 alone.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    else:
        # Attempts of some ten seconds to reach it, which nothing can break off; 20 by default.
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "3")
    try:
        import ray
        import ray.data
    except ImportError:
        raise missing("--ray", "Ray", extra="ray") from None
    with _directory() if local else nullcontext() as directory:
        own: dict[str, Any] = {}
        if local:
            own = {
                "num_cpus": settings.cpus or max(2, machine.cores()),
                "object_store_memory": settings.memory_bytes,
                "include_dashboard": False,
                "_temp_dir": directory,
            }
        handler = signal.getsignal(signal.SIGTERM)
        try:
            try:
                ray.init(address=settings.address, logging_level=logging.ERROR, log_to_driver=False, **own)
            except (ConnectionError, RuntimeError, ValueError) as error:
                hint = "" if local else "; where it asks for a token, RAY_AUTH_MODE=token has one sent"
                raise Unavailable(f"--ray {settings.address}: {error}{hint}") from error
            finally:
                # Ray's own would end the process without publishing what is embedded.
                signal.signal(signal.SIGTERM, handler)
            found = ray.cluster_resources()
            yield Resources(
                machines=max(1, sum(node["Alive"] for node in ray.nodes())),
                cpus=int(found.get("CPU", 0)),
                cards=int(found.get("GPU", 0)),
            )
        finally:
            ray.shutdown()


@contextmanager
def _directory() -> Iterator[str]:
    """For what a local cluster writes, objects that memory does not hold among it; removes those of others
    that were killed."""
    for left in Path(_TOP).glob(f"{_PREFIX}*"):
        with suppress(OSError), open(left / _LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix=_PREFIX, dir=_TOP, ignore_cleanup_errors=True) as directory,
        open(Path(directory, _LOCK), "wb") as file,
    ):
        fcntl.flock(file, fcntl.LOCK_EX)
        yield directory
