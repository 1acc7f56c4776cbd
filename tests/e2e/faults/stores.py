"""The servers that Dynamo can be run with: a real etcd and a real NATS, which tests stop and start."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.service import free_ports
from tests.waiting import wait_until


class StoreServer:
    """One server process with its data in a folder of its own; ``stop`` and ``start`` keep the data.

    ``inside`` is the command prefix that runs it elsewhere, where it has ``address``.
    """

    def __init__(
        self, name: str, folder: Path, *, address: str = "127.0.0.1", inside: Sequence[str] = ()
    ) -> None:
        binary = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/bin")
        if binary is None:
            pytest.skip(f"the Debian package {name}-server is not installed (scripts/system-packages)")
        self._binary = binary
        self._folder = folder / name
        self._folder.mkdir()
        self.address = address
        self._inside = list(inside)
        self.port, self._peer = free_ports(2)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        raise NotImplementedError

    def command(self, port: int, peer: int, folder: Path) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._inside, self._binary, *self.command(self.port, self._peer, self._folder)],
                stdout=log,
                stderr=log,
            )
        listens = partial(socket.create_connection, (self.address, self.port), timeout=1)
        wait_until(listens, despite=OSError, process=self._process).close()

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Etcd(StoreServer):
    def __init__(self, folder: Path, *, address: str = "127.0.0.1", inside: Sequence[str] = ()) -> None:
        super().__init__("etcd", folder, address=address, inside=inside)

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"

    def command(self, port: int, peer: int, folder: Path) -> list[str]:
        client, other = f"http://{self.address}:{port}", f"http://{self.address}:{peer}"
        return [
            *("--data-dir", str(folder / "data"), "--listen-client-urls", client),
            *("--advertise-client-urls", client, "--listen-peer-urls", other),
            *("--initial-advertise-peer-urls", other, "--initial-cluster", f"default={other}"),
        ]


class Nats(StoreServer):
    def __init__(self, folder: Path) -> None:
        super().__init__("nats-server", folder)

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def command(self, port: int, peer: int, folder: Path) -> list[str]:
        return ["-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder / "data")]
