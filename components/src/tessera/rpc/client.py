"""Calls to the instances of one endpoint."""

from __future__ import annotations

import asyncio
from typing import Any

from tessera import wire
from tessera.errors import DeadlineExceeded, ProtocolError, TesseraError, Unavailable
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
        try:
            async with asyncio.timeout(timeout):
                reply = await self._exchange(instance, wire.encode(message))
        except TimeoutError as error:
            raise DeadlineExceeded(f"no answer from {self.address} within {timeout:.1f} s") from error
        if isinstance(reply, wire.Failure):
            raise reply.error()
        return reply

    async def _exchange(self, instance: int, payload: bytes) -> wire.Reply:
        try:
            stream = await self._client.direct(payload, instance, annotated=False)
            answers = [answer async for answer in stream]
        except (asyncio.CancelledError, TimeoutError, TesseraError):
            raise
        except Exception as error:
            # The runtime raises bare exceptions for every failure of its own; whatever the peer's own
            # code had to say comes back as a Failure message instead.
            raise Unavailable(f"instance {instance:x} of {self.address}: {error}") from error
        if len(answers) != 1:
            raise ProtocolError(
                f"instance {instance:x} of {self.address} sent {len(answers)} replies, not one"
            )
        return wire.decode_reply(answers[0])
