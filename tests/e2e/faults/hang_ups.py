"""Clients that hang up at random moments."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import random
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import grpc
import httpx
import numpy as np
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from tessera_kserve import messages_pb2 as pb

_AT_ONCE: Final = 16
_LONGEST_SECONDS: Final = 0.05
_GRPC: Final = "/inference.GRPCInferenceService/"

# What no process holds while nothing is asked, by the names in docs/metrics.md.
IDLE: Final = (
    "tessera_requests_in_flight",
    "tessera_admitted_tokens",
    "tessera_admitted_units",
    "tessera_admitted_response_bytes",
    "tessera_lent_bytes",
    "tessera_queued",
    "tessera_tokens_in_flight",
    "tessera_units_in_flight",
    "tessera_slab_leases",
    "tessera_slab_waiting",
    "tessera_slab_used_bytes",
)

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Route:
    """A path and what makes its bodies, of which no two are alike."""

    path: str
    body: Callable[[], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Target:
    """A frontend; ``grpc`` is its address, empty where it has none, ``authority`` the certificate's file."""

    url: str
    grpc: str = ""
    authority: str = ""

    def connection(self) -> tuple[str, int, ssl.SSLContext | None]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None and parts.port is not None
        tls = ssl.create_default_context(cafile=self.authority) if parts.scheme == "https" else None
        return parts.hostname, parts.port, tls

    def client(self) -> httpx.Client:
        verify = ssl.create_default_context(cafile=self.authority) if self.authority else True
        return httpx.Client(base_url=self.url, verify=verify, timeout=60)

    def channel(self) -> grpc.aio.Channel:
        if not self.authority:
            return grpc.aio.insecure_channel(self.grpc)
        with open(self.authority, "rb") as file:
            return grpc.aio.secure_channel(self.grpc, grpc.ssl_channel_credentials(file.read()))


def _words(count: int) -> str:
    return f"number {next(_numbers)} " + "word " * count


def _picture() -> dict[str, Any]:
    pixels = np.random.default_rng(next(_numbers)).integers(0, 255, (48, 48, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def _kserve(model: str) -> dict[str, Any]:
    data = [_words(5) for _ in range(2)]
    return {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [2, 1], "data": data}]}


def routes(embedder: str, *, reranker: str = "", tokens: str = "") -> list[Route]:
    """The routes of these models."""
    found = [
        Route("/v1/embeddings", lambda: {"model": embedder, "input": [_words(60) for _ in range(4)]}),
        Route("/v1/embeddings", lambda: {"model": embedder, "input": _words(3)}),
        Route(f"/v2/models/{embedder}/infer", lambda: _kserve(embedder)),
        Route("/v1/embeddings", lambda: {"model": embedder, "input": [[_picture()], _words(3)]}),
        Route(
            "/v1/embeddings",
            lambda: {"model": embedder, "input": [[_picture(), {"type": "text", "text": "a"}]]},
        ),
    ]
    if reranker:
        documents = lambda: [_words(10) for _ in range(4)]  # noqa: E731
        found.append(Route("/v1/rerank", lambda: {"model": reranker, "query": "q", "documents": documents()}))
    if tokens:
        found.append(Route("/pooling", lambda: {"model": tokens, "input": [_words(10), _words(2)]}))
    return found


def shapes(request: bytes, head: int) -> dict[str, bytes]:
    """What a client may have sent when it goes away; ``head`` is the length of the request's head."""
    body = request[head:]
    chunk = b"%x\r\n%b\r\n" % (len(body), body)
    chunked = request[: request.index(b"Content-Length")] + b"Transfer-Encoding: chunked\r\n\r\n" + chunk
    return {
        "whole": request,
        "half a body": request[: head + len(body) // 2],
        "head": request[:head],
        "half a head": request[: head // 2],
        "several": request * random.randint(2, 5),
        "chunks": chunked + b"0\r\n\r\n",
        "chunks without end": chunked,
    }


async def _hang_up(target: Target, route: Route) -> str:
    """Send one request, or a part of it, and go away; what was sent."""
    data = json.dumps(route.body()).encode()
    head = f"POST {route.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
    shape, sent = random.choice(list(shapes(request, len(request) - len(data)).items()))
    host, port, tls = target.connection()
    _, writer = await asyncio.open_connection(host, port, ssl=tls)
    with suppress(ConnectionError, ssl.SSLError):
        writer.write(sent)
        # Many in the very moment: the work of the request has just been begun.
        await asyncio.sleep(random.random() * _LONGEST_SECONDS if random.random() < 0.6 else 0)
        if tls is None and random.random() < 0.2:
            writer.write_eof()
            await asyncio.sleep(random.random() * _LONGEST_SECONDS)
        if random.random() < 0.5:
            writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            writer.transport.abort()
        else:
            writer.close()
    return shape


async def _cancel(channel: grpc.aio.Channel, model: str) -> str:
    """Begin a call or a stream of three, and cancel it."""
    made = pb.ModelInferRequest(model_name=model)
    text = _words(20).encode()
    made.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
    made.inputs.add(name="text", datatype="BYTES", shape=[1, 1])
    raw = made.SerializeToString()
    call: Any
    stream = random.random() < 0.3
    if stream:
        call = channel.stream_stream(_GRPC + "ModelStreamInfer")(iter([raw] * 3))
    else:
        call = channel.unary_unary(_GRPC + "ModelInfer")(raw)
    await asyncio.sleep(random.random() * _LONGEST_SECONDS if random.random() < 0.6 else 0)
    call.cancel()
    with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        await call.code()
    return "stream cancelled" if stream else "call cancelled"


async def hang_ups(
    targets: Sequence[Target],
    routes: Sequence[Route],
    *,
    count: int,
    seconds: float,
    model: str,
    clients: int = _AT_ONCE,
    pause: float = 0.0,
    stopping: asyncio.Event | None = None,
) -> Counter[str]:
    """Hang up ``count`` times within ``seconds`` and until ``stopping`` is set; return how often with which
    part of a request sent.

    Each of ``clients`` waits for ``pause`` seconds between two.
    """
    seen: Counter[str] = Counter()
    until = time.monotonic() + seconds
    channels = {target: target.channel() for target in targets if target.grpc}

    async def client() -> None:
        while seen.total() < count and time.monotonic() < until and not (stopping and stopping.is_set()):
            target = random.choice(targets)
            if target in channels and random.random() < 0.3:
                seen[await _cancel(channels[target], model)] += 1
            else:
                with suppress(OSError):
                    seen[await _hang_up(target, random.choice(routes))] += 1
            await asyncio.sleep(pause)

    await asyncio.gather(*(client() for _ in range(clients)))
    for channel in channels.values():
        await channel.close()
    return seen


def answered(target: Target, routes: Sequence[Route]) -> list[str]:
    """Ask each route once; the answers that are not 200."""
    with target.client() as client:
        answers = [(route, client.post(route.path, json=dict(route.body()))) for route in routes]
    return [
        f"{route.path}: {one.status_code} {one.text[:300]}"
        for route, one in answers
        if one.status_code != 200
    ]


def held(metrics: str) -> dict[str, float]:
    """What a process still holds, by its page of metrics; nothing where it is idle."""
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name in IDLE and sample.value
    }
