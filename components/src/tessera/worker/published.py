"""Which lease each recent call was answered with, for readers that have gone since."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

_MOST: Final = 4096


class Published:
    """Remembers as many calls as matter: a lease that is older has run out or been read by now.

    Owned by one event loop.
    """

    def __init__(self) -> None:
        self._leases: OrderedDict[str, int] = OrderedDict()
        self._forgotten: OrderedDict[str, None] = OrderedDict()

    def add(self, call: str, lease: int) -> None:
        if call:
            self._leases[call] = lease
            if len(self._leases) > _MOST:
                self._leases.popitem(last=False)

    def forget(self, call: str) -> int | None:
        """The call's lease, or None when there is none yet; it is not to get one any more."""
        lease = self._leases.pop(call, None)
        if lease is None and call:
            self._forgotten[call] = None
            if len(self._forgotten) > _MOST:
                self._forgotten.popitem(last=False)
        return lease

    def is_forgotten(self, call: str) -> bool:
        return self._forgotten.pop(call, "") is None
