"""Staying listed, leaving in order, and what the health endpoint says."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from pathlib import Path

import httpx
import pytest

from tessera import wire
from tessera.errors import ConfigError
from tessera.rpc import RpcSettings, Runtime
from tests.e2e.service import free_ports
from tests.rpc.conftest import Deployment, echo, echoed, echoing
from tests.waiting import until


def listing(deployment: Deployment) -> list[Path]:
    return [
        path for path in deployment.store.rglob("*") if path.is_file() and deployment.namespace in path.name
    ]


async def test_an_instance_that_discovery_lost_registers_again(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    server = await deployment.serve(echoing, check_every=0.2)
    client = await deployment.client()
    files = listing(deployment)
    assert files
    for path in files:
        path.unlink(missing_ok=True)
    # Its clients may be without it for a moment only.
    await until(lambda: "registering again" in caplog.text and listing(deployment))
    await until(lambda: client.instances() == [server.instance])
    await client.call(server.instance, echo(), timeout=60)


async def test_stop_leaves_discovery_and_finishes_what_is_in_flight(deployment: Deployment) -> None:
    release = asyncio.Event()

    async def handler(message: wire.Request) -> wire.Reply:
        await release.wait()
        return echoed(message)

    server = await deployment.serve(handler)
    client = await deployment.client()
    call = asyncio.ensure_future(client.call(server.instance, echo(5), timeout=60))
    await until(lambda: server.in_flight == 1)
    stopping = asyncio.ensure_future(server.stop(timeout=20))
    await until(lambda: client.instances() == [])
    assert not stopping.done() and not call.done()
    release.set()
    reply = await call
    assert isinstance(reply, wire.EmbedReply) and reply.outputs[0].rows == b"ttttt"
    await asyncio.wait_for(stopping, 60)
    assert server.in_flight == 0


async def test_stop_does_not_wait_for_ever(deployment: Deployment) -> None:
    async def handler(message: wire.Request) -> wire.Reply:
        await asyncio.sleep(600)
        raise AssertionError

    server = await deployment.serve(handler)
    client = await deployment.client()
    call = asyncio.ensure_future(client.call(server.instance, echo(), timeout=60))
    await until(lambda: server.in_flight == 1)
    await asyncio.wait_for(server.stop(timeout=0.3), 60)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


async def test_a_terminated_process_answers_what_it_has_begun(deployment: Deployment) -> None:
    process = await deployment.spawn("second")
    client = await deployment.client()
    (instance,) = client.instances()
    calls = [asyncio.ensure_future(client.call(instance, echo(), timeout=60)) for _ in range(5)]
    assert process.stdout is not None
    for _ in calls:
        assert await asyncio.wait_for(process.stdout.readline(), 60) == b"begun\n"
    # The caller's runtime gives up calls to an instance that leaves before their response streams stand, as
    # they do a moment after the handler is called; the dispatcher makes such a call again elsewhere.
    await asyncio.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    assert all(isinstance(reply, wire.EmbedReply) for reply in await asyncio.gather(*calls))
    assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_discovery_that_is_gone_does_not_keep_a_worker_from_stopping(
    tmp_path: Path, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path / "store"))
    process = await deployment.spawn("echo")
    shutil.rmtree(tmp_path / "store")
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_health_says_no_until_the_worker_serves(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("DYN_SYSTEM_PORT", str(port))
    script = "from tests.rpc.rpc_worker import *; asyncio.run(main(*sys.argv[1:]))"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, deployment.namespace, "unready"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        await asyncio.wait_for(process.stdout.readline(), 60)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            assert (await http.get("/health")).status_code == 503
            process.stdin.write(b"go\n")
            await asyncio.wait_for(process.stdout.readline(), 60)
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/live")).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_health_says_no_while_the_worker_drains(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("DYN_SYSTEM_PORT", str(port))
    process = await deployment.spawn("slow")
    monkeypatch.delenv("DYN_SYSTEM_PORT")
    client = await deployment.client()
    (instance,) = client.instances()
    call = asyncio.ensure_future(client.call(instance, echo(), timeout=60))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        assert (await http.get("/health")).status_code == 200
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 60) == b"begun\n"
        process.send_signal(signal.SIGTERM)

        async def draining() -> bool:
            return (await http.get("/health")).status_code == 503

        await until(draining)
        assert not call.done()
    call.cancel()
    assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_wrong_settings_are_named(deployment: Deployment) -> None:
    with pytest.raises(ConfigError, match="pigeon"):
        Runtime(RpcSettings(request_plane="pigeon"))
    with pytest.raises(ConfigError, match="dyn://namespace"):
        deployment.runtime().endpoint("dyn://only.two")
