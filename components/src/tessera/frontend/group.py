"""What the frontends of one host share: listening sockets, and a table of which each writes one slot.

Nothing but the standard library is imported: the launcher makes the seats.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Self

GROUP_VARIABLE: Final = "TESSERA_FRONTEND_GROUP"
"""The environment variable in which the launcher names a frontend's seat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The place of one frontend among ``size``.

    ``sockets`` are descriptors of the listening sockets, ``table`` and ``cache`` of memory that all of them
    map: for what they count together, and for what they keep for each other. ``port`` is one on which this
    frontend alone answers, too; 0: none. ``name`` is the group's, which is known to workers. ``metrics`` is
    the folder with what each has counted.
    """

    name: str
    index: int
    size: int
    sockets: tuple[int, ...]
    table: int
    cache: int = -1
    metrics: str = ""
    port: int = 0

    @classmethod
    def read(cls, text: str | None) -> Self | None:
        """The seat in the environment variable's value; None where there is no launcher."""
        if not text:
            return None
        given = json.loads(text)
        return cls(**{**given, "sockets": tuple(given["sockets"])})

    def write(self) -> str:
        return json.dumps(asdict(self))


# Words of 64 bits at the beginning of each slot.
PULSE: Final = 0
ACCEPTING: Final = 1
CONNECTIONS: Final = 2
SERVED: Final = 3
LENT_BYTES: Final = 4
_NAMES: Final = 10
# Changes with the names.
_VERSION: Final = 11
_HEAD: Final = 16

# Words of each name behind that: its hash, what it holds, two rates, and a model's workers. Of the five words
# of a rate, which ``admission/rate`` writes and reads: the record's version, odd while it is written and 0
# where there is none; what this frontend has ever taken; and of the record what all had taken, the level of
# the bucket, and when that was.
HELD_TOKENS: Final = 1
HELD_UNITS: Final = 2
HELD_BYTES: Final = 3
HELD_REQUESTS: Final = 3
"""Of a model, which holds no bytes."""
HELD_ALL_REQUESTS: Final = HELD_TOKENS
"""Of no model, which holds no tokens."""
HELD_BODY_BYTES: Final = HELD_UNITS
"""Of no model, which holds no units."""
REQUEST_RATE: Final = 4
TOKEN_RATE: Final = 9
_EMBED: Final = 14
_ENCODE: Final = 15
_ENTRY: Final = 16
_MAX_NAMES: Final = 1 << 18
_FULL: Final = _MAX_NAMES // 2
MOST_KEYS: Final = 1 << 15
"""API keys that a frontend may have. The table has room for what each holds of six models; names of before
take room, too, until half of it is taken and the frontend is started again."""
_SLOT: Final = _HEAD + _MAX_NAMES * _ENTRY

PULSE_SECONDS: Final = 0.1
"""How often a frontend says that it is there."""
# As workers forget a frontend: one that is frozen for longer holds the others up no more.
_SILENT_NS: Final = 5_000_000_000
# One that is frozen or stuck for this long is not waited for to accept connections.
_SLOW_NS: Final = 500_000_000
# struct flock.
_LOCK: Final = struct.Struct("hhqqi")


class FrontendGroup:
    """One frontend's view of the table; without a seat it is the only one.

    Each slot is written by the frontend that it belongs to and read by all: there are no locks, so that none
    is left behind by a process that is killed or frozen. Every word is read and written at once. A frontend
    shows that it lives by a record lock on the byte of its index, which the kernel takes back when it ends.
    ``words`` and ``reals`` are the table as int64 and float64; ``base`` is where the own slot begins,
    ``siblings`` where all others do, and ``others`` where those do that are there now (changed in place).
    ``epoch`` changes when ``others`` does, or the names in a slot.
    """

    def __init__(self, seat: Seat | None = None) -> None:
        index, size = (seat.index, seat.size) if seat else (0, 1)
        self.size = size
        self.base = index * _SLOT
        self.siblings = [at * _SLOT for at in range(size) if at != index]
        self.others: list[int] = []
        self._descriptor = -1
        nbytes = 8 * _SLOT * size
        if seat is None:
            memory = mmap.mmap(-1, nbytes)
        else:
            # Never closed: closing any descriptor of a file ends the process's record locks on it.
            self._descriptor = seat.table
            os.set_inheritable(seat.table, False)
            # The last word is nobody's. Not ftruncate: of two at the same time one could make it smaller.
            os.pwrite(seat.table, b"\0", nbytes - 1)
            fcntl.lockf(seat.table, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index)
            memory = mmap.mmap(seat.table, nbytes)
        self.words = memoryview(memory).cast("q")
        self.reals = memoryview(memory).cast("d")
        self.epoch = 0
        self._seen: tuple[list[int], list[int]] = ([], [])
        self._places: dict[int, tuple[int, dict[int, int]]] = {}
        self._clear()

    def _clear(self) -> None:
        """What the one before in this seat held is given back; what was taken of rates stays taken."""
        words = self.words
        for at in range(self.base, self.base + _HEAD):
            if at - self.base not in (_NAMES, _VERSION):
                words[at] = 0
        if words[self.base + _NAMES] > _FULL:
            words[self.base + _NAMES] = 0
            words[self.base + _VERSION] += 1
            begin = self.base + _HEAD
            for at in range(begin, begin + _MAX_NAMES * _ENTRY):
                words[at] = 0
        for number in range(words[self.base + _NAMES]):
            entry = self.base + _HEAD + number * _ENTRY
            for held in (HELD_TOKENS, HELD_UNITS, HELD_BYTES, _EMBED, _ENCODE):
                words[entry + held] = 0
            for rate in (REQUEST_RATE, TOKEN_RATE):
                if words[entry + rate] % 2:
                    # It ended while it wrote: there is no record here.
                    words[entry + rate] = 0

    def place(self, name: str) -> int:
        """Where the words of a name begin in the own slot; for a new one they are made."""
        hashed = hash_of(name)
        found = self._names(self.base)
        if (at := found.get(hashed)) is not None:
            return at
        count = self.words[self.base + _NAMES]
        if count == _MAX_NAMES:
            raise OverflowError("the frontends' table has no room for another name")
        at = self.base + _HEAD + count * _ENTRY
        self.words[at] = hashed
        self.words[self.base + _NAMES] = count + 1
        self.words[self.base + _VERSION] += 1
        return at

    @property
    def free_names(self) -> int:
        """How many names more the own slot has room for."""
        return _MAX_NAMES - int(self.words[self.base + _NAMES])

    def places(self, name: str, slots: Sequence[int]) -> list[int]:
        """Where the words of a name begin in those of other slots that have it."""
        hashed = hash_of(name)
        return [at for slot in slots if (at := self._names(slot).get(hashed)) is not None]

    def _names(self, slot: int) -> dict[int, int]:
        version, names = self._places.get(slot, (-1, {}))
        if version != (now := self.words[slot + _VERSION]):
            begin = slot + _HEAD
            entries = range(begin, begin + self.words[slot + _NAMES] * _ENTRY, _ENTRY)
            names = {self.words[at]: at for at in entries}
            self._places[slot] = now, names
        return names

    def pulse(self, workers: Mapping[str, tuple[int, int]], *, lent_bytes: int = 0) -> None:
        """Say that this frontend is there, what it knows and what it lends; look for the others.

        ``workers`` are the embed and encode workers of each model.
        """
        for model, (embed, encode) in workers.items():
            at = self.place(model_entry(model))
            self.words[at + _EMBED], self.words[at + _ENCODE] = embed, encode
        self.words[self.base + SERVED] = sum(1 for embed, _ in workers.values() if embed)
        self.words[self.base + LENT_BYTES] = lent_bytes
        self.words[self.base + PULSE] = time.monotonic_ns()
        self.look()

    def look(self) -> bool:
        """Find out which others are there now; whether one less than before is."""
        if not self.siblings:
            return False
        oldest = time.monotonic_ns() - _SILENT_NS
        there = [slot for slot in self.siblings if self.words[slot + PULSE] > oldest and self._lives(slot)]
        less = not set(self.others) <= set(there)
        seen = there, [self.words[slot + _VERSION] for slot in self.siblings]
        if seen != self._seen:
            self._seen = seen
            self.epoch += 1
        self.others[:] = there
        return less

    def _lives(self, slot: int) -> bool:
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, slot // _SLOT, 1, 0)
        return int(_LOCK.unpack(fcntl.fcntl(self._descriptor, fcntl.F_GETLK, asked))[0]) != fcntl.F_UNLCK

    def elsewhere(self, word: int) -> int:
        """The sum of a word over the other frontends that are there."""
        return sum([self.words[slot + word] for slot in self.others])

    def _accepting(self) -> list[int]:
        """The others that take connections now."""
        newest, words = time.monotonic_ns() - _SLOW_NS, self.words
        return [slot for slot in self.others if words[slot + ACCEPTING] and words[slot + PULSE] > newest]

    def excess(self) -> int:
        """How many more connections this frontend has than the one that has fewest."""
        words = self.words
        others = [words[slot + CONNECTIONS] for slot in self._accepting()]
        return max(0, words[self.base + CONNECTIONS] - min(others)) if others else 0

    def leaves_work(self) -> bool:
        """Whether another frontend has workers of a model of which this one knows none."""
        words = self.words
        own = words[self.base + SERVED]
        return any(words[slot + SERVED] > own for slot in self._accepting())

    @property
    def answering(self) -> int:
        """The frontends that answer, this one included."""
        return 1 + len(self._accepting())

    def reach(self, model: str, embed: int, encode: int) -> tuple[int, int]:
        """The workers of a model, of both kinds, that each frontend that answers knows at least.

        ``embed`` and ``encode`` are what this one knows now.
        """
        others, words = self._accepting(), self.words
        places = self.places(model_entry(model), others)
        if len(places) < len(others):
            # One of them has not heard of the model.
            return 0, 0
        return (
            min([embed, *(words[at + _EMBED] for at in places)]),
            min([encode, *(words[at + _ENCODE] for at in places)]),
        )


def model_entry(model: str, client: str = "") -> str:
    """The name in the table of what is held of a model, by all or by one client. No key has such a name."""
    return f"\0{model}\0{client}"


def hash_of(name: str) -> int:
    """64 bits, as the table has them."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)
