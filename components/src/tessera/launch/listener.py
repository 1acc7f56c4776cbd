"""The program that listens on a port of this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from tessera.listening import NOT_HERE

_LISTEN: Final = "0A"


def listens(host: str, port: int) -> bool:
    """Whether anything does."""
    try:
        with socket.create_connection((host, port)):
            return True
    except (OSError, OverflowError, UnicodeError):
        return False


def has_address(host: str) -> bool:
    """Whether this machine has one of the host's addresses, or nobody can know."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return True
    return not found or any(_is_own(family, address) for family, _, _, _, address in found)


def _is_own(family: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.bind(address)
    except OSError as error:
        return error.errno not in NOT_HERE
    return True


def in_use(place: str, port: int) -> str:
    """The sentence that something listens at a place already, with its name and pid where /proc has them."""
    said = f"something listens on {place} already"
    owners = sorted(_owners(port))
    if tesseras := [pid for pid in owners if _is_tessera(pid)]:
        # The launcher has it, too, and is older than what it starts.
        return f"{said}: a Tessera with pid {tesseras[0]}"
    for pid in owners:
        with suppress(OSError):
            return f"{said}: {Path(f'/proc/{pid}/comm').read_text().strip()} with pid {pid}"
    return said


def _owners(port: int) -> Iterator[int]:
    """The processes that hold a listening socket of the port, of those that this user may look at."""
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()] if sockets else []:
        with suppress(OSError):
            if any(
                _leads_to(f"/proc/{pid}/fd/{number}", sockets) for number in os.listdir(f"/proc/{pid}/fd")
            ):
                yield pid


def _leads_to(link: str, places: set[str]) -> bool:
    try:
        return os.readlink(link) in places
    except OSError:
        return False  # closed meanwhile


def _inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTEN and int(words[1].rpartition(":")[2], 16) == port:
                    yield words[9]


def _is_tessera(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return any(word.startswith("tessera.") or os.path.basename(word) == "tessera" for word in words)
