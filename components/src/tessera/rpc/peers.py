"""Calls to the instances of one endpoint: which may be given work now, and how many calls may be repeated."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tessera import tracing, wire
from tessera.budgets import Clock, TokenBucket
from tessera.errors import (
    DeadlineExceeded,
    PayloadTooLarge,
    ProtocolError,
    RequestCancelled,
    TesseraError,
    Unavailable,
)
from tessera.rpc.runtime import Runtime
from tessera.tasks import Left, run_until


class Client:
    """Sends one message to one instance and waits for one reply.

    There is no routing and no retry here: both need to know what the work costs and whether it may run
    twice, which only the caller does.
    """

    def __init__(self, address: str, client: Any) -> None:
        self.address = address
        self._client = client

    @classmethod
    async def connect(cls, runtime: Runtime, address: str) -> Client:
        return cls(address, await runtime.endpoint(address).client())

    def instances(self) -> list[int]:
        """Instance ids that discovery lists now."""
        return list(self._client.instance_ids())

    async def call(self, instance: int, message: wire.Request, *, timeout: float) -> wire.Reply:
        """The instance's reply; ``timeout`` is in seconds.

        Raises what the instance answered as a ``Failure``, ``Unavailable`` when it could not be reached or
        went away, ``DeadlineExceeded`` when the time ran out. Cancelling the call cancels the work there.
        """
        if timeout <= 0:
            raise DeadlineExceeded("the deadline had passed before the call was made")
        with tracing.calling(self.address, instance, message):
            return await self._call(instance, tracing.carrying(message), timeout)

    async def _call(self, instance: int, message: wire.Request, timeout: float) -> wire.Reply:
        try:
            async with asyncio.timeout(timeout):
                reply = await self._exchange(instance, wire.encode(message))
        except TimeoutError as error:
            raise DeadlineExceeded(f"no answer from {self.address} within {timeout:.1f} s") from error
        if isinstance(reply, wire.Failure):
            failure = reply.error()
            if isinstance(failure, RequestCancelled):
                # This call was not cancelled, so the instance ended it for a reason of its own.
                raise Unavailable(f"instance {instance:x} of {self.address} dropped the call")
            raise failure
        return reply

    async def _exchange(self, instance: int, payload: bytes) -> wire.Reply:
        context = new_context()
        try:
            stream = await self._client.direct(payload, instance, annotated=False, context=context)
            answers = [answer async for answer in stream]
        except asyncio.CancelledError:
            # The runtime does not pass a cancellation on by itself: the work there would go on to its end.
            context.stop_generating()
            raise
        except Exception as error:
            # The runtime raises bare exceptions for every failure of its own; whatever the peer's own
            # code had to say comes back as a Failure message instead.
            if str(error).startswith("InvalidRequest") and "too large" in str(error):
                # Every instance would refuse it.
                raise PayloadTooLarge(
                    f"a message of {len(payload)} bytes is larger than this deployment sends"
                ) from error
            raise Unavailable(f"instance {instance:x} of {self.address}: {error}") from error
        if len(answers) != 1:
            raise ProtocolError(
                f"instance {instance:x} of {self.address} sent {len(answers)} replies, not one"
            )
        return wire.decode_reply(answers[0])


def new_context() -> Any:
    """A call's context, through which its caller can stop it."""
    # Not at the top: the module reads the environment, its log level above all, when it is loaded.
    from dynamo.runtime import Context

    return Context()


log = logging.getLogger(__name__)

Check = Callable[[wire.WorkerInfo], str | None]
"""Why an instance may not be used, or None when it may."""

DRAIN_PATIENCE_SECONDS = 5.0
"""How long a process that drains waits for an instance that was set aside to answer again. It does not wait
for a new one: when the whole service is being stopped, none is started."""

_POLL_SECONDS = 0.05
_DESCRIBE_TIMEOUT = 2.0
_BACKOFF_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)


class RetryBudget:
    """How many calls may be made again.

    A first call adds ``ratio`` of a retry, a second of time ``per_second``. The budget holds at most
    ``burst`` and begins full, so that all calls inside a worker that dies can move at once, while a lasting
    shortage adds no more than that share of load. Owned by one event loop.
    """

    def __init__(
        self,
        *,
        ratio: float = 0.2,
        per_second: float = 10.0,
        burst: float = 1024.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._ratio = ratio
        self._bucket = TokenBucket(burst, per_second, clock)

    def called(self, count: int = 1) -> None:
        """Account for first calls."""
        self._bucket.give(self._ratio * count)

    def take(self, count: int = 1) -> bool:
        """Spend retries; false, and nothing spent, when there are not so many."""
        return self._bucket.take_if_there(count)


class Peers:
    """Follows discovery and asks every new instance what it is before it gets work.

    Discovery alone is not enough: a killed worker stays listed until its lease runs out, and a worker of
    another model or version would answer with wrong vectors. An instance that failed a call is set
    aside at once (``suspect``) and comes back when it answers ``Describe`` again. Every instance is asked
    again each ``check_every`` seconds; one that does not answer is set aside too, and the calls that are
    inside it end, because a frozen process would hold them until their deadlines. ``joined`` is called
    before an instance is given its first work. ``caller`` is the name that instances know a frontend by.
    """

    def __init__(
        self,
        client: Client,
        check: Check,
        *,
        joined: Callable[[int, wire.WorkerInfo], None] = lambda *_: None,
        check_every: float = 1.0,
        caller: str = "",
    ) -> None:
        self.client = client
        self._describe = wire.Describe(caller=caller)
        self._check_every = check_every
        self._inside: defaultdict[int, set[asyncio.Future[None]]] = defaultdict(set)
        self._joined = joined
        self._check = check
        self._ready: dict[int, wire.WorkerInfo] = {}
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._refused: set[int] = set()
        self._changed = asyncio.Event()
        self._expecting = True
        self._patience = math.inf
        self._hurried = -math.inf
        self._last_ready = asyncio.get_running_loop().time()
        self._last_answer: dict[int, float] = {}
        self._pulses: set[asyncio.Task[None]] = set()
        self._poll = asyncio.create_task(self._follow(), name=f"peers {client.address}")
        self._pulse = asyncio.create_task(self._take_pulses(), name=f"pulse {client.address}")

    @property
    def ready(self) -> Mapping[int, wire.WorkerInfo]:
        return MappingProxyType(self._ready)

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

    async def call(self, instance: int, message: wire.Request, *, timeout: float) -> wire.Reply:
        """As ``Client.call``, and ``Unavailable`` when the instance stops answering meanwhile."""
        silent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        inside = self._inside[instance]
        inside.add(silent)
        try:
            reply = await run_until(silent, self.client.call(instance, message, timeout=timeout))
        except Left:
            raise Unavailable(f"instance {instance:x} of {self.client.address} stopped answering") from None
        finally:
            inside.discard(silent)
            if not inside:
                self._inside.pop(instance, None)
        if instance in self._ready:
            self._last_answer[instance] = asyncio.get_running_loop().time()
        return reply

    def suspect(self, instance: int) -> None:
        """Give the instance no more work until it has answered again."""
        if self._forget(instance):
            log.warning("%s: instance %x does not answer; set aside", self.client.address, instance)

    def _forget(self, instance: int) -> bool:
        self._last_answer.pop(instance, None)
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
        while True:
            listed = set(self.client.instances())
            for gone in self._ready.keys() - listed:
                self._forget(gone)
            for gone in self._asking.keys() - listed:
                self._asking[gone].cancel()
            self._refused &= listed
            for instance in listed - self._ready.keys() - self._asking.keys() - self._refused:
                task = asyncio.create_task(self._ask(instance))
                self._asking[instance] = task
                task.add_done_callback(functools.partial(self._asked, instance))
            await asyncio.sleep(_POLL_SECONDS)

    async def _take_pulses(self) -> None:
        while True:
            await asyncio.sleep(self._check_every)
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
        except TesseraError:
            # A worker that is only slow to answer this has answered another call since.
            if instance in self._ready and self._last_answer.get(instance, 0.0) < began:
                self.suspect(instance)
                for silent in self._inside.get(instance, ()):
                    if not silent.done():
                        silent.set_result(None)

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
        except TesseraError as error:
            if first:
                log.info("%s: instance %x is not answering yet: %s", self.client.address, instance, error)
            return False
        if not isinstance(info, wire.WorkerInfo):
            reason: str | None = f"it answered Describe with {type(info).__name__}"
        else:
            reason = self._check(info)
        if reason is not None or not isinstance(info, wire.WorkerInfo):
            self._refused.add(instance)
            log.error("%s: instance %x is not used: %s", self.client.address, instance, reason)
            return True
        try:
            self._joined(instance, info)
        except Exception as error:
            if first:
                log.error("%s: instance %x cannot be used yet: %s", self.client.address, instance, error)
            return False
        self._ready[instance] = info
        self._changed.set()
        return True
