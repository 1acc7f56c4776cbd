"""``python -m benchmarks.floor frontend|worker``: the least that a service like this one can do.

The frontend is an empty ASGI application on uvicorn: it reads a body, tokenises its texts, calls the worker
with nothing over Dynamo and answers with nothing. The worker answers the call with nothing. Of Tessera there
are only the defaults of Dynamo's settings.

``--bare`` makes it a service without a feature: the application is FastAPI's, the call brings the tokens, the
worker hands them to a thread, which hands a vector back, and the answer is that vector in OpenAI's JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from queue import SimpleQueue
from typing import Any, Final

import msgspec
import numpy as np
import orjson
import uvicorn
import uvloop
from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from tokenizers import Tokenizer

from benchmarks import usage
from tessera.rpc import set_environment_defaults

_ENDPOINT: Final = "floor.worker.generate"
_ANSWER: Final = b'{"data":[]}'
_WIDTH: Final = 2048

Message = dict[str, Any]
Answer = Callable[[list[str]], Awaitable[bytes]]


def _runtime() -> Any:
    # Not at the top: the module reads the environment when it is loaded.
    from dynamo.runtime import DistributedRuntime

    return DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")


async def _worker(*, bare: bool) -> None:
    async def empty(request: object, context: Any) -> AsyncIterator[bytes]:
        yield b""

    await _runtime().endpoint(_ENDPOINT).serve_endpoint(_embedding() if bare else empty)


def _embedding() -> Callable[..., AsyncIterator[bytes]]:
    """A handler that gives every call the same vector, by way of a thread."""
    loop = asyncio.get_running_loop()
    vector = np.random.default_rng(0).standard_normal(_WIDTH).astype(np.float32)
    asked: SimpleQueue[tuple[asyncio.Future[bytes], bytes]] = SimpleQueue()

    def run() -> None:
        while True:
            promise, tokens = asked.get()
            assert len(np.frombuffer(tokens, np.int32))
            loop.call_soon_threadsafe(promise.set_result, vector.tobytes())

    async def embed(request: bytes, context: Any) -> AsyncIterator[bytes]:
        promise: asyncio.Future[bytes] = loop.create_future()
        asked.put((promise, msgspec.msgpack.decode(request, type=bytes)))
        yield msgspec.msgpack.encode(await promise)

    threading.Thread(target=run, name="engine-bare", daemon=True).start()
    return embed


def _texts(body: Message) -> list[str]:
    if "input" in body:
        texts = body["input"]
        return [texts] if isinstance(texts, str) else texts
    found = [part["text"] for part in body["messages"][0]["content"] if part["type"] == "text"]
    # An image alone is a token.
    return found or ["image"]


async def _frontend(port: int, tokenizer: Tokenizer, *, bare: bool) -> None:
    from dynamo.runtime import Context

    client = await _runtime().endpoint(_ENDPOINT).client()
    await client.wait_for_instances()
    (instance,) = client.instance_ids()

    async def called(message: bytes) -> bytes:
        replies = await client.direct(message, instance, annotated=False, context=Context())
        return b"".join([reply async for reply in replies])

    async def empty(texts: list[str]) -> bytes:
        tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        await called(b"")
        return _ANSWER

    async def embedded(texts: list[str]) -> bytes:
        (tokens,) = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        reply = await called(msgspec.msgpack.encode(np.array(tokens.ids, np.int32).tobytes()))
        vector = np.frombuffer(msgspec.msgpack.decode(reply, type=bytes), np.float32)
        body = {
            "object": "list",
            "data": [{"object": "embedding", "index": 0, "embedding": vector}],
            "model": "bare",
            "usage": {"prompt_tokens": len(tokens.ids), "total_tokens": len(tokens.ids)},
        }
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)

    config = uvicorn.Config(
        _fastapi(embedded) if bare else _asgi(empty),
        host="127.0.0.1",
        port=port,
        access_log=False,
        log_level="warning",
        lifespan="off",
    )
    await uvicorn.Server(config).serve()


def _asgi(answer: Answer) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        pieces, more = [], True
        while more:
            message = await receive()
            pieces.append(message.get("body", b""))
            more = message.get("more_body", False)
        body = _ANSWER if scope["method"] != "POST" else await answer(_texts(orjson.loads(b"".join(pieces))))
        length = str(len(body)).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": body})

    return app


def _fastapi(answer: Answer) -> FastAPI:
    app = FastAPI()

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        body = await answer(_texts(orjson.loads(await request.body())))
        return Response(body, media_type="application/json")

    return app


def main() -> int:
    parser = usage.parser("benchmarks.floor", __doc__)
    parser.add_argument("role", choices=("frontend", "worker"))
    parser.add_argument("--port", type=int, help="of the frontend, on loopback")
    parser.add_argument("--tokenizer", help="tokenizer.json of the frontend")
    parser.add_argument("--bare", action="store_true", help="FastAPI, tokens, a thread and a vector besides")
    options: argparse.Namespace = parser.parse_args()
    set_environment_defaults()
    if options.role == "worker":
        uvloop.run(_worker(bare=options.bare))
    else:
        uvloop.run(_frontend(options.port, Tokenizer.from_file(options.tokenizer), bare=options.bare))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
