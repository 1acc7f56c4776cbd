"""Several hosts on this machine: network namespaces joined by an Ethernet switch that tests can disturb.

The switch is a thread that carries frames between TAP devices, so that delay, loss and partitions need no
module of the kernel and no firewall.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import selectors
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import pytest

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_MTU = 9000


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclass(slots=True)
class Weather:
    """What happens to frames between two hosts, in each direction."""

    delay: float = 0.0
    loss: float = 0.0
    parted: bool = False


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace with one address; the first host is the machine itself."""

    index: int
    name: str
    address: str
    device: str

    def command(self, *arguments: str) -> list[str]:
        """The command line that runs this inside the namespace."""
        return [*arguments] if not self.name else ["ip", "netns", "exec", self.name, *arguments]


@dataclass(slots=True)
class Network:
    """``hosts[0]`` is this machine."""

    hosts: list[Host]
    _taps: list[int]
    _weather: dict[frozenset[int], Weather] = field(default_factory=dict)
    _thread: threading.Thread | None = None
    _stopping: bool = False

    @classmethod
    def create(cls, count_: int) -> Network:
        """Skips the test where that is not allowed."""
        if os.geteuid() != 0 or not os.access("/dev/net/tun", os.R_OK | os.W_OK):
            pytest.skip("network namespaces need root and /dev/net/tun")
        if shutil.which("ip") is None:
            pytest.skip("the Debian package iproute2 is not installed (scripts/system-packages)")
        own = f"{os.getpid() % 100_000:x}"
        hosts, taps = [], []
        try:
            for index in range(count_ + 1):
                device, name = f"ts{own}-{index}", f"ts{own}-{index}" if index else ""
                tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
                taps.append(tap)
                fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TAP | _IFF_NO_PI))
                host = Host(index, name, f"10.213.{os.getpid() % 250}.{index + 1}", device)
                if index:
                    ip("netns", "add", name)
                    hosts.append(host)
                    ip("link", "set", device, "netns", name)
                    ip("-n", name, "link", "set", "lo", "up")
                else:
                    hosts.append(host)
                inside = ["-n", name] if index else []
                ip(*inside, "addr", "add", f"{host.address}/24", "dev", device)
                ip(*inside, "link", "set", device, "mtu", str(_MTU), "up")
        except (OSError, subprocess.CalledProcessError) as error:
            cls(hosts, taps).close()
            pytest.skip(f"network namespaces with TAP devices are not allowed here (NET_ADMIN): {error}")
        made = cls(hosts, taps)
        made._thread = threading.Thread(target=made._carry, daemon=True)
        made._thread.start()
        return made

    def between(self, one: int, other: int) -> Weather:
        """What happens between two hosts; change it at any time."""
        return self._weather.setdefault(frozenset((one, other)), Weather())

    def calm(self) -> None:
        self._weather.clear()

    def close(self) -> None:
        self._stopping = True
        if self._thread is not None:
            self._thread.join()
        for host in self.hosts:
            if host.name:
                subprocess.run(["ip", "netns", "del", host.name], capture_output=True)
        for tap in self._taps:
            os.close(tap)

    def _carry(self) -> None:
        chance = random.Random(0)
        places: dict[bytes, int] = {}
        waiting: list[tuple[float, int, int, bytes]] = []
        numbers = count()
        with selectors.DefaultSelector() as ready:
            for index, tap in enumerate(self._taps):
                ready.register(tap, selectors.EVENT_READ, index)
            while not self._stopping:
                pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.05
                for key, _ in ready.select(min(pause, 0.05)):
                    for frame in _frames(key.fd):
                        source, target = frame[6:12], frame[:6]
                        places[source] = key.data
                        known = places.get(target)
                        for index in [known] if known is not None else range(len(self._taps)):
                            weather = self._weather.get(frozenset((key.data, index)), Weather())
                            if index == key.data or weather.parted or chance.random() < weather.loss:
                                continue
                            due = time.monotonic() + weather.delay
                            heapq.heappush(waiting, (due, next(numbers), index, frame))
                now = time.monotonic()
                while waiting and waiting[0][0] <= now:
                    _, _, index, frame = heapq.heappop(waiting)
                    # A device whose queue is full loses the frame, as networks do.
                    _send(self._taps[index], frame)


def _frames(tap: int) -> Sequence[bytes]:
    found = []
    try:
        while len(found) < 64:
            found.append(os.read(tap, _MTU + 64))
    except BlockingIOError:
        pass
    return found


def _send(tap: int, frame: bytes) -> None:
    try:
        os.write(tap, frame)
    except OSError:
        return
