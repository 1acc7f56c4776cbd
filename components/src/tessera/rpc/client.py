"""Calls to the instances of one endpoint; those that meet travel to their instance together."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import math
import random
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import msgspec

from tessera import tracing, wire
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
from tessera.turns import Rounds, Turns

# A joint call is no longer than this: the smallest limit of a request plane, that of NATS, is 1 MiB.
_JOINT_BYTES: Final = 512 << 10
_JOINT_REQUESTS: Final = 256
# A longer message, of an image in most cases, travels alone: nothing waits until it is there.
_LARGE_BYTES: Final = 64 << 10
# To write a message of more, and to hand it to the runtime, takes milliseconds of the loop, and twice its
# length of memory until the instance has it: so many at a time, of which a client has a quarter.
_LONG_BYTES: Final = 1 << 20
_MOST_LONG: Final = 8
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
# What clients see: no internal names.
_LATE: Final = "the request was not answered in time"
# An instance that takes a message of cancellations no sooner is frozen or gone.
_CANCEL_SECONDS: Final = 2.0


class _Call(msgspec.Struct, eq=False):
    """A request, and the reply or the error that its caller waits for.

    It is ``answered`` when its reply has come from the instance.
    """

    request: wire.Request
    nbytes: int
    reply: asyncio.Future[wire.Reply | Exception]
    joint: _Joint | None = None
    position: int = 0
    answered: bool = False

    def settle(self, reply: wire.Reply | Exception) -> None:
        if not self.reply.done():
            self.reply.set_result(reply)


class _Joint(msgspec.Struct, eq=False):
    """Calls that travel together: ``unanswered`` by position, of which ``left`` are those nobody waits for.

    ``first`` is the number of the first call. Once it has ``begun`` the instance has all of them, and has
    learned of the calls that were ``cancelled`` before. ``nbytes`` is the length of its message, once it is
    written.
    """

    first: int
    unanswered: dict[int, _Call]
    cancelled: tuple[int, ...] = ()
    left: set[int] = set()
    begun: bool = False
    large: bool = False
    long: bool = False
    nbytes: int = 0
    task: asyncio.Task[None] | None = None
    joined: Joined | None = None

    def take(self, answer: wire.Replies | wire.Failure | wire.Piece) -> None:
        replies = answer.replies if isinstance(answer, wire.Replies) else self._replies(answer)
        for position, reply in replies.items():
            call = self.unanswered.pop(position, None)
            if call is None:
                raise ProtocolError(f"a reply at {position}, where no request waits for one")
            self.left.discard(position)
            call.answered = True
            call.settle(reply)

    def _replies(self, answer: wire.Failure | wire.Piece) -> Mapping[int, wire.Reply]:
        """Return the replies that a piece completes; a failure is the answer to every call."""
        if isinstance(answer, wire.Piece):
            if self.joined is None:
                self.joined = Joined(len(self.unanswered))
            whole = self.joined.add(answer)
            if whole is None:
                return {}
            if isinstance(whole, wire.Replies):
                return whole.replies
            answer = whole
        self.fail(answer.error)
        return {}

    def fail(self, make: Callable[[], Exception]) -> None:
        """Give what has no answer an error of its own."""
        for call in self.unanswered.values():
            call.settle(make())
        self.unanswered.clear()


class _Channel:
    """The calls of this process to one instance, which leave together when they meet.

    ``_joints`` are those that are not answered to the end.
    """

    def __init__(self, instance: int, client: Any) -> None:
        self._name = f"worker {instance:x}"
        self._instance = instance
        self._client = client
        self._caller = secrets.randbits(63)
        self._numbers = 0
        self._waiting: list[_Call] = []
        self._joints: set[_Joint] = set()
        self._cancelled: list[int] = []
        self._starting = 0
        self._turns = Turns(_MOST_LONG)
        self._rounds = Rounds()
        self._leaving = False
        # Of late, where the message was not a large one.
        self._reply_seconds = 0.0
        self._loop = asyncio.get_running_loop()
        # What is done for several calls runs in the context of none.
        self._context = contextvars.Context()
        # Not at the top: the module reads the environment, its log level above all, when it is loaded.
        from dynamo.runtime import Context

        # A call's context, through which its caller can stop it.
        self._new_context: Callable[[], Any] = Context
        self.last_answer = -math.inf
        """When the instance last answered anything, by the clock of the event loop."""

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._joints or self._cancelled)

    @property
    def under_way(self) -> int:
        return len(self._waiting) + sum(len(joint.unanswered) - len(joint.left) for joint in self._joints)

    def add(self, request: wire.Request) -> _Call:
        call = _Call(request, request.size, self._loop.create_future())
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
        joint.long = large and calls[0].nbytes > _LONG_BYTES
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
        context = self._new_context()
        began = self._loop.time()
        try:
            begin = self._begin_in_turn if joint.long else self._begin
            stream = await begin(joint, message, context)
            # The instance has all of them. Of those that left meanwhile it has not heard.
            joint.begun = True
            self._starting -= not joint.large
            self._cancelled += [joint.first + position for position in joint.left]
            self._leave_soon()
            async for answer in stream:
                joint.take(wire.decode_replies(answer))
                if not joint.unanswered:
                    self._joints.discard(joint)
                self.last_answer = self._loop.time()
                if not joint.large:
                    self._reply_seconds += (self.last_answer - began - self._reply_seconds) / 8
            if joint.unanswered:
                joint.fail(lambda: ProtocolError(f"{self._name} sent fewer replies than it got requests"))
        except asyncio.CancelledError:
            # The runtime does not pass a cancellation on by itself: the work there would go on to its end.
            context.stop_generating()
            raise
        except Exception as error:
            if isinstance(error, ProtocolError):
                context.stop_generating()
            self._broken(joint, message, error)

    async def _begin(self, joint: _Joint, message: wire.Calls, context: Any) -> Any:
        """Hand a message to its instance, and return the stream of its answers.

        What was written is not kept until they come: of images it is as long as they are.
        """
        payload = wire.encode(message)
        joint.nbytes = len(payload)
        # A message of cancellations alone has no caller that would give it up.
        async with asyncio.timeout(None if message.requests else _CANCEL_SECONDS):
            return await self._client.direct(payload, self._instance, annotated=False, context=context)

    async def _begin_in_turn(self, joint: _Joint, message: wire.Calls, context: Any) -> Any:
        """As ``_begin``, by turns of clients, one message in a round of the loop."""
        (request,) = message.requests
        client = request.client if isinstance(request, wire.EmbedRequest | wire.EncodeRequest) else ""
        async with self._turns.slot(client):
            await self._rounds.turn(client)
            return await self._begin(joint, message, context)

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
        if joint.unanswered:
            # They would keep their requests, of images maybe, that nobody waits for any more.
            joint.fail(lambda: Unavailable(f"{self._name}: the call was cancelled"))
        self._leave_soon()

    def _broken(self, joint: _Joint, message: wire.Calls, error: Exception) -> None:
        nbytes = joint.nbytes
        # The runtime raises bare exceptions for every failure of its own; whatever the peer's own code had
        # to say comes back as a Failure message instead.
        too_large = str(error).startswith("InvalidRequest") and "too large" in str(error)
        if isinstance(error, ProtocolError) or (nbytes and not too_large):
            kind = ProtocolError if isinstance(error, ProtocolError) else Unavailable
            reason = f"{self._name}: {error}"
            joint.fail(lambda: kind(reason))
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
        self._channels: dict[int, _Channel] = {}

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
        return sum(channel.under_way for channel in self._channels.values())

    def instances(self) -> list[int]:
        """Instance ids that discovery lists now."""
        return list(self._client.instance_ids())

    async def call(self, instance: int, message: wire.Request, *, timeout: float) -> wire.Reply:
        """The instance's reply; ``timeout`` is in seconds.

        Raises what the instance answered as a ``Failure``, ``Unavailable`` when it could not be reached or
        went away, ``DeadlineExceeded`` when the time ran out. Cancelling the call cancels the work there.
        """
        if timeout <= 0:
            raise DeadlineExceeded(_LATE)
        if not tracing.recording():
            return await self._call(instance, message, timeout)
        with tracing.calling(self.address, instance, message):
            return await self._call(instance, tracing.carrying(message), timeout)

    def give_up(self, instance: int, make: Callable[[], TesseraError]) -> None:
        """End all calls to the instance with an error, and their work there."""
        if channel := self._channels.get(instance):
            channel.fail(make)

    def last_answer(self, instance: int) -> float:
        """Return when the instance last answered anything, by the clock of the event loop."""
        channel = self._channels.get(instance)
        return -math.inf if channel is None else channel.last_answer

    async def _call(self, instance: int, message: wire.Request, timeout: float) -> wire.Reply:
        channel = self._channels.get(instance) or self._open(instance)
        call = channel.add(message)
        timer = asyncio.get_running_loop().call_later(timeout, self._expire, call)
        try:
            reply = await call.reply
        finally:
            timer.cancel()
            if not call.answered:
                channel.drop(call)
        if isinstance(reply, wire.Failure | Exception):
            raise _error_of(reply, instance)
        return reply

    def _expire(self, call: _Call) -> None:
        call.settle(DeadlineExceeded(_LATE))

    def _open(self, instance: int) -> _Channel:
        # Restarted instances come back under new names: nobody calls the old ones any more.
        for gone in [other for other, channel in self._channels.items() if channel.idle]:
            del self._channels[gone]
        channel = self._channels[instance] = _Channel(instance, self._client)
        return channel


def _error_of(reply: wire.Failure | Exception, instance: int) -> Exception:
    """What a call raises in place of a reply."""
    error = reply.error() if isinstance(reply, wire.Failure) else reply
    if isinstance(reply, wire.Failure) and isinstance(error, RequestCancelled):
        # The call was not cancelled, so the instance ended it for a reason of its own.
        return Unavailable(f"worker {instance:x} dropped the call")
    return error


class Loads:
    """Counts what is in flight at each instance, in any unit."""

    def __init__(self) -> None:
        self._loads: dict[int, int] = {}

    def __getitem__(self, instance: int) -> int:
        return self._loads.get(instance, 0)

    def add(self, instance: int, more: int) -> None:
        """Count so much more, or less where it is negative."""
        load = self._loads.pop(instance, 0) + more
        if load > 0:
            self._loads[instance] = load

    def least(self, instances: Collection[int]) -> int:
        """Return the instance with the smallest load, at random where several have it.

        ``instances`` must not be empty. In a fixed order every caller that has little in flight would choose
        the first.
        """
        return min(instances, key=lambda instance: (self._loads.get(instance, 0), random.random()))
