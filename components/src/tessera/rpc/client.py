"""Calls to the instances of one endpoint."""

from __future__ import annotations

import asyncio
from typing import Any

from tessera import tracing, wire
from tessera.errors import (
    DeadlineExceeded,
    PayloadTooLarge,
    ProtocolError,
    RequestCancelled,
    Unavailable,
)
from tessera.rpc.runtime import Runtime


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
