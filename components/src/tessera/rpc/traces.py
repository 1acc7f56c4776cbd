"""Calls between processes in traces: one span of the caller and one of the called, of one trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

from tessera import tracing, wire

# What asks for work; the others only look after the deployment.
_WORK: Final = wire.EmbedRequest | wire.EncodeRequest


@contextmanager
def calling(address: str, instance: int, message: wire.Request) -> Iterator[wire.Request]:
    """The message as it is to be sent, within the span of the call to that instance."""
    if not tracing.recording() or not isinstance(message, _WORK):
        yield message
        return
    attributes = {**_call(address, message), "tessera.instance": f"{instance:x}"}
    with tracing.span(str(attributes["rpc.method"]), attributes, tracing.Kind.CLIENT):
        yield msgspec.structs.replace(message, trace=tracing.carrier())


@contextmanager
def answering(address: str, message: wire.Request) -> Iterator[None]:
    """The span of the answer to a message that came to this address."""
    if not tracing.recording() or not isinstance(message, _WORK):
        yield
        return
    attributes = _call(address, message)
    with tracing.serve(str(attributes["rpc.method"]), message.trace, attributes):
        yield


def _call(address: str, message: wire.EmbedRequest | wire.EncodeRequest) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "rpc.system.name": "dynamo",
        "rpc.method": f"{address.removeprefix('dyn://')}/{type(message).__name__}",
        "tessera.request_id": message.request_id,
    }
    if isinstance(message, wire.EmbedRequest):
        return attributes | {
            "tessera.items": len(message.items),
            "tessera.tokens": sum(len(item.tokens) // 4 for item in message.items),
            "tessera.images": sum(len(item.images) for item in message.items),
        }
    return attributes | {"tessera.tiles": message.image.tiles, "tessera.input": message.image.param}
