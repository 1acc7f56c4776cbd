"""Images that a client has sent before, by the name it gave them."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Known:
    """What a prompt and a cache key need of an image: its 32-byte blake3 hash, upright size in pixels."""

    digest: bytes
    width: int
    height: int


class KnownMedia:
    """The last ``most`` names of each client; owned by one event loop.

    A name is only ever looked up for the client that gave it: guessing another one's names leads nowhere.
    What it stands for is what that client sent last under it; images themselves are not kept.
    """

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._clients: defaultdict[str, OrderedDict[str, Known]] = defaultdict(OrderedDict)

    def remember(self, client: str, name: str, known: Known) -> None:
        names = self._clients[client]
        names[name] = known
        names.move_to_end(name)
        if len(names) > self._most:
            names.popitem(last=False)

    def find(self, client: str, name: str) -> Known | None:
        names = self._clients.get(client)
        if names is None or name not in names:
            return None
        names.move_to_end(name)
        return names[name]
