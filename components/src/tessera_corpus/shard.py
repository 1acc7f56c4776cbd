"""The part of a corpus that one job of several takes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from blake3 import blake3

from tessera.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """The ``number``-th of ``count`` parts, from 1.

    A name is in part ``1 + h % count``, where ``h`` is the first 8 bytes of its blake3 hash in UTF-8, little
    endian. So it stays in its part whatever else is in the corpus, and rows of one id meet in one part.
    """

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise ConfigError(f"a shard is from 1/{self.count} on, not {self.number}/{self.count}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """The shard that ``3/16`` names."""
        if not re.fullmatch(r"[0-9]{1,9}/[0-9]{1,9}", text):
            raise ConfigError(f"a shard is written like 3/16, not {text!r}")
        number, count = text.split("/")
        return cls(int(number), int(count))

    def holds(self, name: str) -> bool:
        return int.from_bytes(blake3(name.encode()).digest(8), "little") % self.count == self.number - 1
