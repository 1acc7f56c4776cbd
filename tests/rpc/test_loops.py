"""Discovery is followed, and workers are kept listed and asked, after an error that nobody expects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tessera import wire
from tessera.rpc import Client, Peers, Runtime, Server
from tessera.tasks import KEEPER
from tests.loops import Switch, fails_and_goes_on, quick
from tests.rpc.conftest import Deployment, echoing
from tests.waiting import until

__all__ = ["quick"]

pytestmark = pytest.mark.usefixtures("quick")


class Listing:
    """A Dynamo client whose list of instances cannot always be had."""

    def __init__(self, client: Any, switch: Switch) -> None:
        self._client, self._switch = client, switch

    def instance_ids(self) -> list[int]:
        self._switch.check()
        return list(self._client.instance_ids())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class OddRuntime(Runtime):
    """A runtime that gives such lists."""

    switch: Switch

    async def follow(self, address: str) -> Any:
        return Listing(await super().follow(address), self.switch)


@pytest.fixture
async def runtime(deployment: Deployment) -> AsyncIterator[OddRuntime]:
    runtime = OddRuntime(deployment.config)
    runtime.switch = Switch()
    yield runtime
    runtime.shutdown()


async def test_discovery_is_followed_after_an_error(
    deployment: Deployment, runtime: OddRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    server = await deployment.serve(echoing)
    peers = Peers(await Client.connect(runtime, server.address), lambda _: None)
    try:
        assert await peers.wait(60)
        second: list[Server] = []

        def two() -> bool:
            return len(peers.ready) == 2

        runtime.switch.on = True
        await until(lambda: KEEPER.trouble is not None)
        second.append(await deployment.serve(echoing))
        await asyncio.sleep(0.2)
        assert not two()
        await fails_and_goes_on("discovery", runtime.switch, two, caplog)
    finally:
        await peers.close()


async def test_an_instance_that_cannot_be_asked_is_asked_again(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    switch = Switch()

    class OddClient(Client):
        async def call(self, instance: int, message: wire.Request, *, timeout: float) -> wire.Reply:
            switch.check()
            return await super().call(instance, message, timeout=timeout)

    server = await deployment.serve(echoing)
    client = await OddClient.connect(deployment.runtime(), server.address)
    switch.on = True
    peers = Peers(client, lambda _: None, check_every=0.05)
    try:
        await until(lambda: switch.raised > 1)
        assert not peers.ready and "could not be asked" in caplog.text
        switch.on = False
        await until(lambda: bool(peers.ready))
        # The same once it has work.
        switch.on = True
        await until(lambda: not peers.ready)
        switch.on = False
        await until(lambda: bool(peers.ready))
    finally:
        await peers.close()


async def test_a_worker_is_kept_listed_after_an_error(
    deployment: Deployment, runtime: OddRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(runtime, deployment.address, echoing)
    await server.start(check_every=0.01)
    entry = next(path for path in deployment.store.rglob("*") if path.is_file())
    try:
        runtime.switch.on = True
        await until(lambda: KEEPER.trouble is not None)
        entry.unlink()
        await fails_and_goes_on(
            "registration",
            runtime.switch,
            lambda: any(path.is_file() for path in deployment.store.rglob("*")),
            caplog,
        )
    finally:
        await server.stop(timeout=1)
