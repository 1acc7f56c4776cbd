"""Calls to the instances of one endpoint: which may be given work now, and how many calls may be repeated."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import math
import random
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

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
from tessera.rpc.pieces import Joined
from tessera.rpc.runtime import Runtime
from tessera.tasks import KEEPER

# A joint call is no longer than this: the smallest limit of a request plane, that of NATS, is 1 MiB.
_JOINT_BYTES: Final = 512 << 10
_JOINT_REQUESTS: Final = 256
# A longer message, of an image in most cases, travels alone: nothing waits until it is there.
_LARGE_BYTES: Final = 64 << 10
# While so many joint calls are on their way to an instance, further calls wait for each other. 64 callers
# that ask again at once cost two thirds of the processor time without a limit; 1 and 4 do no better.
_MOST_STARTING: Final = 2
# A call waits for others for an eighth of the time that replies take, and no longer than this, while others
# are under way: 30 callers at 570 calls a second to a worker that runs a batch each 40 ms, 2.5 requests in a
# call and not 1.5, 0.63 ms of processor time each on both sides and not 0.95, 30.3 ms to wait and not 29.3.
# The loop's clock counts milliseconds; what would be less leaves at once.
_LINGER_SHARE: Final = 1 / 8
_LINGER_SECONDS: Final = 8e-3
_LEAST_LINGER_SECONDS: Final = 1e-3
# An instance that takes a message of cancellations no sooner is frozen or gone.
_CANCEL_SECONDS: Final = 2.0


@dataclass(slots=True, eq=False)
class _Call:
    """A request, and the reply or the error that its caller waits for."""

    request: wire.Request
    nbytes: int
    reply: asyncio.Future[wire.Reply | Exception]
    joint: _Joint | None = None
    position: int = 0

    def settle(self, reply: wire.Reply | Exception) -> None:
        if not self.reply.done():
            self.reply.set_result(reply)


@dataclass(slots=True, eq=False)
class _Joint:
    """Calls that travel together: ``unanswered`` by position, of which ``left`` are those nobody waits for.

    ``first`` is the number of the first call. Once it has ``begun`` the instance has all of them, and has
    learned of the calls that were ``cancelled`` before.
    """

    first: int
    unanswered: dict[int, _Call]
    cancelled: tuple[int, ...] = ()
    left: set[int] = field(default_factory=set)
    begun: bool = False
    large: bool = False
    task: asyncio.Task[None] | None = None
    joined: Joined | None = None

    def take(self, answer: wire.Replies | wire.Failure | wire.Piece) -> None:
        if isinstance(answer, wire.Piece):
            if self.joined is None:
                self.joined = Joined(len(self.unanswered))
            whole = self.joined.add(answer)
            if whole is None:
                return
            answer = whole
        if isinstance(answer, wire.Failure):
            self.fail(answer.error)
            return
        for position, reply in answer.replies.items():
            call = self.unanswered.pop(position, None)
            if call is None:
                raise ProtocolError(f"a reply at {position}, where no request waits for one")
            self.left.discard(position)
            call.settle(reply)

    def fail(self, make: Callable[[], Exception]) -> None:
        """Give what has no answer an error of its own."""
        for call in self.unanswered.values():
            call.settle(make())
        self.unanswered.clear()


class _Line:
    """The calls of this process to one instance, which leave together when they meet.

    ``_joints`` are those that are not answered to the end.
    """

    def __init__(self, address: str, instance: int, client: Any) -> None:
        self._name = f"instance {instance:x} of {address}"
        self._instance = instance
        self._client = client
        self._caller = secrets.randbits(63)
        self._numbers = 0
        self._waiting: list[_Call] = []
        self._joints: set[_Joint] = set()
        self._cancelled: list[int] = []
        self._starting = 0
        self._leaving = False
        # Of late, where the message was not a large one.
        self._reply_seconds = 0.0
        self._loop = asyncio.get_running_loop()
        # What is done for several calls runs in the context of none.
        self._context = contextvars.Context()

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._joints or self._cancelled)

    @property
    def under_way(self) -> int:
        return len(self._waiting) + sum(len(joint.unanswered) - len(joint.left) for joint in self._joints)

    def add(self, request: wire.Request) -> _Call:
        call = _Call(request, wire.nbytes(request), self._loop.create_future())
        if call.nbytes > _LARGE_BYTES:
            self._start([call], large=True)
        else:
            self._waiting.append(call)
            self._leave_soon()
        return call

    def drop(self, call: _Call) -> None:
        """The caller waits no longer: what is not answered yet is not wanted any more."""
        joint = call.joint
        if joint is None:
            self._waiting.remove(call)
        elif call.position in joint.unanswered:
            joint.left.add(call.position)
            if len(joint.left) == len(joint.unanswered):
                assert joint.task is not None
                joint.task.cancel()
            elif joint.begun:
                self._cancelled.append(joint.first + call.position)
                self._leave_soon()

    def fail(self, make: Callable[[], Exception]) -> None:
        """Give every call an error; whoever waits for it drops it then."""
        for call in self._waiting:
            call.settle(make())
        for joint in self._joints:
            for call in joint.unanswered.values():
                call.settle(make())

    def _leave_soon(self) -> None:
        if self._leaving or not (self._waiting or self._cancelled):
            return
        if self._starting < _MOST_STARTING:
            self._leaving = True
            linger = min(self._reply_seconds * _LINGER_SHARE, _LINGER_SECONDS) if self._joints else 0.0
            if linger < _LEAST_LINGER_SECONDS:
                self._loop.call_soon(self._leave, context=self._context)
            else:
                self._loop.call_later(linger, self._leave, context=self._context)

    def _leave(self) -> None:
        self._leaving = False
        waiting, self._waiting = self._waiting, []
        together: list[_Call] = []
        size = 0
        for call in waiting:
            if size + call.nbytes > _JOINT_BYTES or len(together) == _JOINT_REQUESTS:
                self._start(together)
                together, size = [], 0
            together.append(call)
            size += call.nbytes
        if together or self._cancelled:
            self._start(together)

    def _start(self, calls: Sequence[_Call], *, large: bool = False) -> None:
        cancelled, self._cancelled = tuple(self._cancelled), []
        joint = _Joint(self._numbers, dict(enumerate(calls)), cancelled, large=large)
        self._numbers += len(calls)
        for position, call in joint.unanswered.items():
            call.joint, call.position = joint, position
        message = wire.Calls(
            caller=self._caller,
            first=joint.first,
            requests=tuple(call.request for call in calls),
            cancelled=cancelled,
        )
        self._joints.add(joint)
        self._starting += not large
        joint.task = self._loop.create_task(self._travel(joint, message), context=self._context)
        # Not in the task itself, which does not run at all when it is cancelled before its first step.
        joint.task.add_done_callback(functools.partial(self._ended, joint), context=self._context)

    async def _travel(self, joint: _Joint, message: wire.Calls) -> None:
        context = new_context()
        payload, began = b"", self._loop.time()
        try:
            payload = wire.encode(message)
            # A message of cancellations alone has no caller that would give it up.
            async with asyncio.timeout(None if message.requests else _CANCEL_SECONDS):
                stream = await self._client.direct(payload, self._instance, annotated=False, context=context)
            self._begin(joint)
            async for answer in stream:
                joint.take(wire.decode_replies(answer))
                if not joint.unanswered:
                    self._joints.discard(joint)
                if not joint.large:
                    self._reply_seconds += (self._loop.time() - began - self._reply_seconds) / 8
            joint.fail(lambda: ProtocolError(f"{self._name} sent fewer replies than it got requests"))
        except asyncio.CancelledError:
            # The runtime does not pass a cancellation on by itself: the work there would go on to its end.
            context.stop_generating()
            raise
        except ProtocolError as error:
            context.stop_generating()
            reason = error.message
            joint.fail(lambda: ProtocolError(f"{self._name}: {reason}"))
        except Exception as error:
            self._broken(joint, message, len(payload), error)

    def _ended(self, joint: _Joint, task: asyncio.Task[None]) -> None:
        """Give back what ``_start`` counted, however far the task came."""
        self._joints.discard(joint)
        # A cancelled task keeps its frames, and with them this joint: a cycle.
        joint.task = None
        if not joint.begun:
            self._starting -= not joint.large
            if task.cancelled():
                # The instance may not have heard of them.
                self._cancelled += joint.cancelled
        # So are the requests, of images maybe, that nobody waits for any more.
        joint.fail(lambda: Unavailable(f"{self._name}: the call was cancelled"))
        self._leave_soon()

    def _begin(self, joint: _Joint) -> None:
        joint.begun = True
        self._starting -= not joint.large
        self._cancelled += [joint.first + position for position in joint.left]
        self._leave_soon()

    def _broken(self, joint: _Joint, message: wire.Calls, nbytes: int, error: Exception) -> None:
        # The runtime raises bare exceptions for every failure of its own; whatever the peer's own code had
        # to say comes back as a Failure message instead.
        too_large = str(error).startswith("InvalidRequest") and "too large" in str(error)
        if nbytes and not too_large:
            reason = f"{self._name}: {error}"
            joint.fail(lambda: Unavailable(reason))
        elif len(joint.unanswered) > 1:
            # One of them cannot be written, or this deployment takes shorter messages.
            self._cancelled += message.cancelled
            wanted = [call for position, call in joint.unanswered.items() if position not in joint.left]
            joint.unanswered.clear()
            for call in wanted:
                self._start([call])
        elif too_large:
            # Every instance would refuse it.
            joint.fail(
                lambda: PayloadTooLarge(f"a message of {nbytes} bytes is larger than this deployment sends")
            )
        else:
            joint.fail(lambda: error)


class Client:
    """Sends one message to one instance and waits for one reply.

    There is no routing and no retry here: both need to know what the work costs and whether it may run
    twice, which only the caller does. Calls to one instance that are made in one round of the event loop
    travel in one call of the runtime; while others are under way there, they wait a little for more. Each is
    answered when its own reply comes, and a stream that breaks fails those that have none yet.
    """

    def __init__(self, address: str, client: Any) -> None:
        self.address = address
        self._client = client
        self._lines: dict[int, _Line] = {}

    @classmethod
    async def connect(cls, runtime: Runtime, address: str) -> Client:
        """Raises ``Unavailable`` where discovery by files cannot be watched: of inotify there are too few."""
        try:
            return cls(address, await runtime.follow(address))
        except Exception as error:
            # The runtime's errors are of no type of their own. EMFILE, which is not of descriptors alone.
            if "os error 24" not in str(error):
                raise
            raise Unavailable(
                f"{address}: discovery cannot be watched, too many open files ({error}): raise "
                "fs.inotify.max_user_instances (128 on most hosts; a frontend takes 4 for each model, a "
                "worker 2), or the limit of descriptors (ulimit -n)"
            ) from error

    @property
    def under_way(self) -> int:
        """Calls that are not answered, and not given up."""
        return sum(line.under_way for line in self._lines.values())

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

    def give_up(self, instance: int, make: Callable[[], TesseraError]) -> None:
        """End all calls to the instance with an error, and their work there."""
        if line := self._lines.get(instance):
            line.fail(make)

    async def _call(self, instance: int, message: wire.Request, timeout: float) -> wire.Reply:
        line = self._lines.get(instance) or self._line(instance)
        call = line.add(message)
        timer = asyncio.get_running_loop().call_later(timeout, self._expire, call, timeout)
        try:
            reply = await call.reply
        finally:
            timer.cancel()
            line.drop(call)
        if isinstance(reply, wire.Failure):
            failure = reply.error()
            if isinstance(failure, RequestCancelled):
                # This call was not cancelled, so the instance ended it for a reason of its own.
                raise Unavailable(f"instance {instance:x} of {self.address} dropped the call")
            raise failure
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _expire(self, call: _Call, timeout: float) -> None:
        call.settle(DeadlineExceeded(f"no answer from {self.address} within {timeout:.1f} s"))

    def _line(self, instance: int) -> _Line:
        # Restarted instances come back under new names: nobody calls the old ones any more.
        for gone in [other for other, line in self._lines.items() if line.idle]:
            del self._lines[gone]
        line = self._lines[instance] = _Line(self.address, instance, self._client)
        return line


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


def least_loaded(instances: Collection[int], loads: Mapping[int, int]) -> int:
    """Return the instance with the smallest load, at random where several have it.

    ``instances`` must not be empty; one that ``loads`` lacks has nothing in flight. In a fixed order every
    caller that has little in flight would choose the first.
    """
    return min(instances, key=lambda instance: (loads.get(instance, 0), random.random()))


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
        self._poll = KEEPER.start("discovery", self._follow, every=_POLL_SECONDS, of=client.address)
        self._pulse = KEEPER.start("pulses", self._take_pulses, every=check_every, of=client.address)

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
        reply = await self.client.call(instance, message, timeout=timeout)
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
        """Look once which instances are listed, and ask those that are new."""
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
            # A worker that is only slow to answer this has answered another call since.
            if instance in self._ready and self._last_answer.get(instance, 0.0) < began:
                self.suspect(instance)
                silent = f"instance {instance:x} of {self.client.address} stopped answering"
                self.client.give_up(instance, lambda: Unavailable(silent))

    def _asked(self, instance: int, _: asyncio.Task[None]) -> None:
        self._asking.pop(instance, None)

    async def _ask(self, instance: int) -> None:
        attempt = 0
        while not await self._admitted(instance, first=attempt == 0):
            delay = _BACKOFF_SECONDS[min(attempt, len(_BACKOFF_SECONDS) - 1)]
            await asyncio.sleep(delay * random.uniform(0.8, 1.2))
            attempt += 1

    async def _admitted(self, instance: int, *, first: bool) -> bool:
        """As ``_admit``; an instance is worth asking again after any other error, too."""
        try:
            return await self._admit(instance, first=first)
        except Exception:
            if first:
                log.exception("%s: instance %x could not be asked", self.client.address, instance)
            return False

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
