"""The store behind discovery, watched without the runtime."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

from tessera import etcd

FORGOTTEN = os.EX_TEMPFAIL
"""The exit status of a process that discovery has lost; its supervisor starts a new one."""

_POLL_SECONDS = 0.25
_CONNECT_SECONDS = 1.0


async def until_back(backend: str) -> None:
    """Wait until a process that starts now would find discovery; at once for all but etcd.

    A runtime that is made earlier waits for etcd too, but blocks its whole process meanwhile, signals and
    all, and gives up after ``ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS``.
    """
    if backend != "etcd":
        return
    servers = etcd.servers(os.environ)
    while True:
        if any(await asyncio.gather(*(_accepts(host, port) for host, port in servers))):
            return
        await asyncio.sleep(_POLL_SECONDS)


async def until_wiped() -> Path:
    """Wait until the directory of file discovery is removed; its path.

    The runtime watches the directory that it has found and no later one of the same name.
    """
    root = Path(os.environ.get("DYN_FILE_KV") or Path(tempfile.gettempdir()) / "dynamo_store_kv")
    folder = root / "v1" / "instances"
    held = await _opened(folder)
    try:
        # The open descriptor keeps the inode from being used again for a later directory.
        while not _removed(held):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)
    finally:
        os.close(held)
    return folder


async def _opened(folder: Path) -> int:
    while True:
        try:
            return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            await asyncio.sleep(_POLL_SECONDS)


def _removed(descriptor: int) -> bool:
    try:
        return os.fstat(descriptor).st_nlink == 0
    except OSError:
        # Network file systems forget what has been removed.
        return True


async def _accepts(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True
