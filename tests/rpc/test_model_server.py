"""A model of Dynamo's own: what discovery says of it, and what its callers get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tessera import errors
from tessera.rpc import ModelServer
from tests.rpc.conftest import Deployment
from tests.waiting import until

NAME = "some-model"
ANSWER = {"object": "list", "data": [], "model": NAME}


class Answering:
    """A handler that raises what it is told to, waits when asked to, and remembers what it was given."""

    def __init__(self) -> None:
        self.bodies: list[Mapping[str, Any]] = []
        self.error: Exception | None = None
        self.cancelled = asyncio.Event()

    async def __call__(self, body: Mapping[str, Any], request_id: str) -> dict[str, Any]:
        self.bodies.append(body)
        if body["input"] == "wait":
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        if self.error is not None:
            raise self.error
        return {**ANSWER, "request_id": request_id}


@pytest.fixture
async def served(deployment: Deployment) -> tuple[ModelServer, Answering]:
    handler = Answering()
    server = ModelServer(deployment.runtime(), f"{deployment.namespace}.embed.model", NAME, handler)
    await server.start(check_every=0.1)
    return server, handler


async def call(deployment: Deployment, server: ModelServer, body: object) -> list[Any]:
    """Every item that a caller of the runtime's own gets."""
    client = await deployment.runtime().endpoint(server.address).client()
    await until(lambda: server.instance in client.instance_ids())
    stream = await client.direct(body, server.instance)
    return [item async for item in stream]


def listed(store: Path, namespace: str) -> dict[str, dict[str, Any]]:
    """Discovery's records for this namespace by their kind."""
    found = {}
    for path in store.rglob("*"):
        if path.is_file() and path.name.startswith(namespace):
            record = json.loads(path.read_bytes())
            found[record["type"]] = record
    return found


async def test_discovery_has_its_card_and_loses_it_when_the_server_stops(
    deployment: Deployment, served: tuple[ModelServer, Answering]
) -> None:
    card = listed(deployment.store, deployment.namespace)["Model"]["card_json"]
    assert (card["display_name"], card["model_type"], card["model_input"]) == (NAME, "Embedding", "Text")
    await served[0].stop(timeout=1)
    await until(lambda: not listed(deployment.store, deployment.namespace), despite=OSError)


async def test_it_lists_the_model_again_when_discovery_has_lost_it(
    deployment: Deployment, served: tuple[ModelServer, Answering]
) -> None:
    # What a frozen process finds when it goes on: its lease has run out, its records are gone.
    for path in deployment.store.rglob("*"):
        if path.is_file():
            path.unlink(missing_ok=True)
    await until(
        lambda: listed(deployment.store, deployment.namespace).keys() == {"Model", "Endpoint"},
        # Of files that are just being written.
        despite=(OSError, ValueError),
    )
    (item,) = await call(deployment, served[0], {"model": NAME, "input": "text"})
    assert item.data()["data"] == []


async def test_a_body_arrives_as_it_was_sent_and_probes_do_not_arrive(
    deployment: Deployment, served: tuple[ModelServer, Answering]
) -> None:
    server, handler = served
    body = {"model": NAME, "input": ["a", "b"], "dimensions": 8}
    (item,) = await call(deployment, server, body)
    answer = item.data()
    assert answer.pop("request_id")
    assert (answer, handler.bodies) == (ANSWER, [body])
    (item,) = await call(deployment, server, {"probe": "tessera"})
    assert item.data() == {"status": "ok"} and len(handler.bodies) == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.InvalidInput("input[3] is bad"), r"input\[3\] is bad"),
        (errors.UnsupportedMedia("input[3] is no image"), "UnsupportedMedia: unsupported_media"),
        (errors.Overloaded("full"), "RateLimited: overloaded"),
        (errors.DeadlineExceeded("late"), "Unavailable: deadline_exceeded"),
        (errors.EngineFailed("broken"), "Internal: engine_failed"),
        (ValueError("nobody foresaw this"), "Internal: internal_error"),
    ],
)
async def test_errors_have_dynamos_classes(
    deployment: Deployment, served: tuple[ModelServer, Answering], error: Exception, kind: str
) -> None:
    server, handler = served
    handler.error = error
    with pytest.raises(Exception, match=f"^{kind}"):
        await call(deployment, server, {"model": NAME, "input": "text"})


async def test_a_caller_who_goes_away_cancels_the_work(
    deployment: Deployment, served: tuple[ModelServer, Answering]
) -> None:
    server, handler = served
    runtime = deployment.runtime()
    client = await runtime.endpoint(server.address).client()
    await until(lambda: server.instance in client.instance_ids())
    from dynamo.runtime import Context

    context = Context()
    stream = await client.direct({"model": NAME, "input": "wait"}, server.instance, context=context)
    await until(lambda: handler.bodies)
    context.stop_generating()
    await asyncio.wait_for(handler.cancelled.wait(), 60)
    await until(lambda: server.in_flight == 0)
    del stream
