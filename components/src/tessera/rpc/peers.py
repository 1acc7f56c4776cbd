"""The instances of one endpoint: which may be given work now, and which do not answer."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType

from tessera import wire
from tessera.errors import DeadlineExceeded, TesseraError, Unavailable
from tessera.rpc.client import Client
from tessera.tasks import KEEPER

log = logging.getLogger(__name__)

Check = Callable[[wire.WorkerInfo], str | None]
"""Why an instance may not be used, or None when it may."""

DRAIN_PATIENCE_SECONDS = 5.0
"""How long a process that drains waits for an instance that was set aside to answer again. It does not wait
for a new one: when the whole service is being stopped, none is started."""

_POLL_SECONDS = 0.05
_DESCRIBE_TIMEOUT = 2.0
_BACKOFF_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)


class Peers:
    """Follows discovery and asks every new instance what it is before it gets work.

    Discovery alone is not enough: a killed worker stays listed until its lease runs out, and a worker of
    another model or version would answer with wrong vectors. An instance that failed a call is set
    aside at once (``suspect``) and comes back when it answers ``Describe`` again. Every instance is asked
    again each ``check_every`` seconds; one that does not answer is set aside too, and the calls that are
    inside it end, because a frozen process would hold them until their deadlines. ``joined`` is called
    before an instance is given its first work, and ``left`` once it is not listed any more. ``caller`` is
    the name that instances know a frontend by.
    """

    def __init__(
        self,
        client: Client,
        check: Check,
        *,
        joined: Callable[[int, wire.WorkerInfo], None] = lambda *_: None,
        left: Callable[[int], None] = lambda _: None,
        check_every: float = 1.0,
        caller: str = "",
    ) -> None:
        self.client = client
        self.call = client.call
        self._describe = wire.Describe(caller=caller)
        self._joined = joined
        self._left = left
        # Those that have joined and not yet left.
        self._members: set[int] = set()
        self._check = check
        self._ready: dict[int, wire.WorkerInfo] = {}
        self.ready: Mapping[int, wire.WorkerInfo] = MappingProxyType(self._ready)
        """The instances that may be given work now."""
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._refused: set[int] = set()
        self._changed = asyncio.Event()
        self._expecting = True
        self._patience = math.inf
        self._hurried = -math.inf
        self._last_ready = asyncio.get_running_loop().time()
        self._pulses: set[asyncio.Task[None]] = set()
        self._poll = KEEPER.start("discovery", self._follow, every=_POLL_SECONDS, of=client.address)
        self._pulse = KEEPER.start("pulses", self._take_pulses, every=check_every, of=client.address)

    async def wait_back(self, patience: float, timeout: float) -> bool:
        """Wait until ``patience`` seconds after the last instance was there, and at most ``timeout`` seconds.

        True when there is one. The supervisor of a worker that has just died starts it again, so a wait pays;
        in a deployment that has been without any for longer it does not.
        """
        absent = asyncio.get_running_loop().time() - self._last_ready
        return bool(self._ready) or await self.wait(min(patience - absent, timeout))

    def expect_none(self) -> None:
        """Wait for no instance any more: discovery will not list one."""
        self._expecting = False
        self._changed.set()

    def hurry(self, patience: float) -> None:
        """From now on wait at most ``patience`` seconds after the last instance was there, or after this."""
        self._patience = patience
        self._hurried = asyncio.get_running_loop().time()
        self._changed.set()

    async def wait(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds for an instance; true when there is one."""
        deadline = asyncio.get_running_loop().time() + timeout
        while not self._ready:
            if not self._expecting:
                return False
            hurry = max(self._last_ready, self._hurried) + self._patience
            left = min(deadline, hurry) - asyncio.get_running_loop().time()
            if left <= 0:
                return False
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                return bool(self._ready)
        return True

    def suspect(self, instance: int) -> None:
        """Give the instance no more work until it has answered again."""
        if self._forget(instance):
            log.warning("%s: instance %x does not answer; set aside", self.client.address, instance)

    def _forget(self, instance: int) -> bool:
        if self._ready.pop(instance, None) is None:
            return False
        self._last_ready = asyncio.get_running_loop().time()
        return True

    async def close(self) -> None:
        tasks = [self._poll, self._pulse, *self._pulses, *self._asking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self) -> None:
        """Look once which instances are listed, and ask those that are new."""
        listed = set(self.client.instances())
        for gone in self._ready.keys() - listed:
            self._forget(gone)
        for gone in self._asking.keys() - listed:
            self._asking[gone].cancel()
        for gone in self._members - listed:
            self._members.discard(gone)
            self._left(gone)
        self._refused &= listed
        for instance in listed - self._ready.keys() - self._asking.keys() - self._refused:
            task = asyncio.create_task(self._ask(instance))
            self._asking[instance] = task
            task.add_done_callback(functools.partial(self._asked, instance))

    async def _take_pulses(self) -> None:
        """Begin to ask every instance once how it is."""
        for instance in self._ready:
            task = asyncio.create_task(self._take_pulse(instance))
            self._pulses.add(task)
            task.add_done_callback(self._pulses.discard)

    async def _take_pulse(self, instance: int) -> None:
        began = asyncio.get_running_loop().time()
        try:
            info = await self.client.call(instance, self._describe, timeout=_DESCRIBE_TIMEOUT)
            if isinstance(info, wire.WorkerInfo) and instance in self._ready and self._check(info) is None:
                # How much it takes may have changed.
                self._ready[instance] = info
        except Exception as error:
            if not isinstance(error, TesseraError):
                log.exception("%s: instance %x could not be asked", self.client.address, instance)
            # A worker that is only slow to answer this has answered another call since. One that refuses to
            # say what it is gets no work.
            slow = isinstance(error, DeadlineExceeded | Unavailable)
            answers = slow and self.client.last_answer(instance) >= began
            if instance in self._ready and not answers:
                self.suspect(instance)
                silent = f"worker {instance:x} stopped answering"
                self.client.give_up(instance, lambda: Unavailable(silent))

    def _asked(self, instance: int, _: asyncio.Task[None]) -> None:
        self._asking.pop(instance, None)

    async def _ask(self, instance: int) -> None:
        attempt = 0
        while not await self._admit(instance, first=attempt == 0):
            delay = _BACKOFF_SECONDS[min(attempt, len(_BACKOFF_SECONDS) - 1)]
            await asyncio.sleep(delay * random.uniform(0.8, 1.2))
            attempt += 1

    async def _admit(self, instance: int, *, first: bool) -> bool:
        """Ask the instance what it is, once; false when it is worth asking again."""
        try:
            info = await self.client.call(instance, self._describe, timeout=_DESCRIBE_TIMEOUT)
            if not isinstance(info, wire.WorkerInfo):
                reason: str | None = f"it answered Describe with {type(info).__name__}"
            else:
                reason = self._check(info)
            if reason is not None or not isinstance(info, wire.WorkerInfo):
                self._refused.add(instance)
                log.error("%s: instance %x is not used: %s", self.client.address, instance, reason)
                return True
        except TesseraError as error:
            if first:
                log.info("%s: instance %x is not answering yet: %s", self.client.address, instance, error)
            return False
        except Exception:
            if first:
                log.exception("%s: instance %x could not be asked", self.client.address, instance)
            return False
        try:
            self._joined(instance, info)
        except Exception as error:
            if first:
                log.error("%s: instance %x cannot be used yet: %s", self.client.address, instance, error)
            return False
        self._members.add(instance)
        self._ready[instance] = info
        self._changed.set()
        return True
