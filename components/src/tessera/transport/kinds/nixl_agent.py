"""The one module that knows NIXL: an agent, its memory, its peers, its reads.

The agent is made from NIXL's bindings, because ``nixl_agent`` fixes the progress thread's delay at zero.
With zero the thread spins and takes a whole core from each process, idle or not; with any other value it
sleeps on the backend's descriptors and wakes as soon as something arrives.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from tessera.errors import TransportUnavailable
from tessera.extras import lack
from tessera.tasks import Poll
from tessera.transport.slab.space import SharedRange

_PROGRESS_DELAY_US: Final = 100_000
_log = logging.getLogger(__name__)

Range = tuple[int, int, int]
"""Address, bytes, device index."""


# Between two looks at reads that were given up.
_REAP_SECONDS: Final = 0.05


@functools.cache
def _bindings() -> ModuleType:
    # NIXL reports every agent it makes, on standard output and through a handler of its own. Its
    # warnings and errors go to this process's log instead.
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    import nixl

    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    bindings: ModuleType = nixl._bindings
    return bindings


@functools.cache
def nixl_missing() -> str | None:
    """Why NIXL cannot be used in this process, or None when it can."""
    try:
        _bindings()
    except ModuleNotFoundError as error:
        return f"it {lack(error.name or 'nixl', extra='nixl')}"
    except ImportError as error:
        return f"nixl cannot be imported: {error}"
    return None


@dataclass(slots=True, eq=False)
class _Transfer:
    handle: int
    peer: bytes
    memory: SharedRange
    given_up: bool = False


@contextmanager
def _or_unavailable(what: str) -> Iterator[None]:
    """Raise ``TransportUnavailable`` for anything that NIXL raises: its exceptions have no common base."""
    try:
        yield
    except Exception as error:
        raise TransportUnavailable(f"{what}: {error}") from error


@contextmanager
def _as_well_as_it_can(what: str, level: int = logging.DEBUG) -> Iterator[None]:
    """Log anything that NIXL raises, and go on."""
    try:
        yield
    except Exception as error:
        _log.log(level, "%s: %s", what, error)


class NixlAgent:
    """One agent over the UCX backend. Not thread-safe: every call is made from one event loop."""

    def __init__(self, name: str, *, interfaces: str = "") -> None:
        self._nixl = _bindings()
        if interfaces:
            # UCX takes this from nowhere else; NIXL's own parameters leave its listeners as they are.
            os.environ["UCX_NET_DEVICES"] = interfaces
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = _PROGRESS_DELAY_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_NONE
        # The name must be unique among all agents that may ever meet.
        self._agent: Any = self._nixl.nixlAgent(f"{name}-{uuid.uuid4().hex}", config)
        with _or_unavailable("NIXL's UCX backend cannot start"):
            self._agent.createBackend("UCX", {})
        self._registered: list[Any] = []
        self._running: list[_Transfer] = []
        self._leaving: set[bytes] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def registrations(self) -> int:
        return len(self._registered)

    @property
    def quarantined(self) -> int:
        """Reads that were given up and may still write to their memory."""
        return sum(transfer.given_up for transfer in self._running)

    def register(self, ranges: Sequence[Range]) -> None:
        """Make memory readable, or writable by this agent's own reads, until ``close``."""
        entries = [(address, nbytes, index, "") for address, nbytes, index in ranges]
        descriptors = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, entries)
        with _or_unavailable("NIXL cannot register memory"):
            self._agent.registerMem(descriptors, [])
        self._registered.append(descriptors)

    def metadata(self) -> bytes:
        """What a peer needs to read from the memory registered so far."""
        metadata: bytes = self._agent.getLocalMD()
        return metadata

    def add_peer(self, metadata: bytes) -> bytes:
        """The name of the peer that the metadata describes; nothing is sent yet."""
        with _or_unavailable("NIXL does not accept the peer's metadata"):
            name: bytes = self._agent.loadRemoteMD(metadata)
        self._leaving.discard(name)
        return name

    def remove_peer(self, peer: bytes) -> None:
        """Forget a peer once none of its reads is under way."""
        self._leaving.add(peer)
        self._reap_and_again()

    def notifications(self) -> list[bytes]:
        """Messages that peers sent since the last call."""
        arrived: dict[Any, list[bytes]] = {}
        with _as_well_as_it_can("NIXL cannot collect notifications", logging.WARNING):
            arrived = self._agent.getNotifs({}, [])
        return [message for messages in arrived.values() for message in messages]

    def notify(self, peer: bytes, message: bytes) -> None:
        """Send a message on its own, as well as it can be done."""
        with _as_well_as_it_can("NIXL cannot notify a peer"):
            self._agent.genNotif(peer, message)

    async def read(
        self,
        peer: bytes,
        local: Range,
        remote: Range,
        *,
        message: bytes = b"",
        timeout: float,
        memory: SharedRange,
    ) -> None:
        """Read ``remote`` into ``local``, host memory of the same size; ``message`` follows the data.

        The read holds ``memory``, under which ``local`` was taken, for as long as anything can write there:
        until this returns, or longer when the wait was cancelled or ran out of time.
        """
        self.reap()
        nixl = self._nixl
        with _or_unavailable("NIXL cannot read from a peer"):
            handle = self._agent.createXferReq(
                nixl.NIXL_READ,
                nixl.nixlXferDList(nixl.DRAM_SEG, [local]),
                nixl.nixlXferDList(nixl.DRAM_SEG, [remote]),
                peer,
                message,
                [],
            )
        memory.hold()
        transfer = _Transfer(handle, peer, memory)
        self._running.append(transfer)
        try:
            state = self._agent.postXferReq(handle, message)
            if state == nixl.NIXL_IN_PROG:
                state = await self._outcome(transfer, timeout)
        except asyncio.CancelledError:
            self._give_up(transfer)
            raise
        except Exception as error:
            self._finish(transfer)
            raise TransportUnavailable(f"a NIXL read failed: {error}") from error
        if state == nixl.NIXL_IN_PROG:
            self._give_up(transfer)
            raise TransportUnavailable(f"a NIXL read took longer than {timeout:.3g} s")
        self._finish(transfer)
        if state != nixl.NIXL_SUCCESS:
            raise TransportUnavailable(f"a NIXL read failed with state {state}")

    def reap(self) -> None:
        """Finish the given-up reads that have ended, and the removal of peers that waited for them."""
        for transfer in list(self._running):
            if transfer.given_up and not self._under_way(transfer):
                self._finish(transfer)
        for peer in list(self._leaving):
            if all(transfer.peer != peer for transfer in self._running):
                self._leaving.discard(peer)
                with _as_well_as_it_can("NIXL cannot forget a peer"):
                    self._agent.invalidateRemoteMD(peer)

    def _give_up(self, transfer: _Transfer) -> None:
        # UCX cannot call a read back: the memory stays lent until the read is over.
        transfer.given_up = True
        self._reap_and_again()

    def _reap_and_again(self) -> None:
        """Reap now, and on a timer for as long as anything is still to be reaped."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.reap()
        if self.quarantined or self._leaving:
            self._timer = asyncio.get_running_loop().call_later(_REAP_SECONDS, self._reap_and_again)

    def close(self) -> None:
        """Deregister everything and end the agent; reads that are under way end with it."""
        if self._agent is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        # Reads end first: none may be under way from a peer that is forgotten, or in memory that is given up.
        for transfer in list(self._running):
            self._finish(transfer)
        self.reap()
        for descriptors in self._registered:
            with _as_well_as_it_can("NIXL cannot deregister memory", logging.WARNING):
                self._agent.deregisterMem(descriptors, [])
        self._registered.clear()
        # The backend ends with the last reference to the agent.
        self._agent = None

    async def _outcome(self, transfer: _Transfer, timeout: float) -> Any:
        """The state of a posted read when it is over, or after ``timeout`` seconds."""
        poll = Poll()
        while self._agent is not None:
            state = self._agent.getXferStatus(transfer.handle)
            if state != self._nixl.NIXL_IN_PROG or poll.elapsed >= timeout:
                return state
            await poll.pause()
        raise TransportUnavailable("the NIXL agent was closed")

    def _under_way(self, transfer: _Transfer) -> bool:
        try:
            return bool(self._agent.getXferStatus(transfer.handle) == self._nixl.NIXL_IN_PROG)
        except Exception:
            return False

    def _finish(self, transfer: _Transfer) -> None:
        if transfer not in self._running:
            return
        self._running.remove(transfer)
        with _as_well_as_it_can("NIXL cannot release a read"):
            self._agent.releaseXferReq(transfer.handle)
        transfer.memory.drop()
