"""``python -m benchmarks.floor frontend|worker``: the least that a service like this one can do.

The frontend is an empty ASGI application on uvicorn: it reads a body, tokenises its texts, calls the worker
with nothing over Dynamo and answers with nothing. The worker answers the call with nothing. Of Tessera there
are only the defaults of Dynamo's settings.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import orjson
import uvicorn
import uvloop
from tokenizers import Tokenizer

from benchmarks import usage
from tessera.rpc import set_environment_defaults

_ENDPOINT: Final = "floor.worker.generate"
_ANSWER: Final = b'{"data":[]}'

Message = dict[str, Any]


def _runtime() -> Any:
    # Not at the top: the module reads the environment when it is loaded.
    from dynamo.runtime import DistributedRuntime

    return DistributedRuntime(asyncio.get_running_loop(), "file", "tcp")


async def _worker() -> None:
    async def generate(request: object, context: Any) -> AsyncIterator[bytes]:
        yield b""

    await _runtime().endpoint(_ENDPOINT).serve_endpoint(generate)


def _texts(body: Message) -> list[str]:
    if "input" in body:
        texts = body["input"]
        return [texts] if isinstance(texts, str) else texts
    return [part["text"] for part in body["messages"][0]["content"] if part["type"] == "text"]


async def _frontend(port: int, tokenizer: Tokenizer) -> None:
    from dynamo.runtime import Context

    client = await _runtime().endpoint(_ENDPOINT).client()
    await client.wait_for_instances()
    (instance,) = client.instance_ids()

    async def app(
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        pieces, more = [], True
        while more:
            message = await receive()
            pieces.append(message.get("body", b""))
            more = message.get("more_body", False)
        if scope["method"] == "POST":
            tokenizer.encode_batch_fast(_texts(orjson.loads(b"".join(pieces))), add_special_tokens=False)
            stream = await client.direct(b"", instance, annotated=False, context=Context())
            async for _ in stream:
                pass
        length = str(len(_ANSWER)).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": _ANSWER})

    config = uvicorn.Config(
        app, host="127.0.0.1", port=port, access_log=False, log_level="warning", lifespan="off"
    )
    await uvicorn.Server(config).serve()


def main() -> int:
    parser = usage.parser("benchmarks.floor", __doc__)
    parser.add_argument("role", choices=("frontend", "worker"))
    parser.add_argument("--port", type=int, help="of the frontend, on loopback")
    parser.add_argument("--tokenizer", help="tokenizer.json of the frontend")
    options: argparse.Namespace = parser.parse_args()
    set_environment_defaults()
    if options.role == "worker":
        uvloop.run(_worker())
    else:
        uvloop.run(_frontend(options.port, Tokenizer.from_file(options.tokenizer)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
