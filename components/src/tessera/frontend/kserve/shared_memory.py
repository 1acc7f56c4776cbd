"""Shared memory that clients of this host registered: inputs are read from it, outputs written to it.

Files of ``/dev/shm`` are read and written by offset and never mapped: a mapping ends the process that touches
it when the client shortens the file. Off without a prefix, which every key begins with.
"""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.errors import InvalidInput, UnsupportedOperation
from tessera.frontend.api.values import clip
from tessera.frontend.kserve.call import Parameter

_FOLDER: Final = Path("/dev/shm")
_MOST_REGIONS: Final = 1024
_NAME_CHARACTERS: Final = 200
REGION: Final = "shared_memory_region"
SIZE: Final = "shared_memory_byte_size"
OFFSET: Final = "shared_memory_offset"
PARAMETERS: Final = frozenset((REGION, SIZE, OFFSET))


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """``byte_size`` bytes from ``offset`` of the file; ``descriptor`` stays open until it is unregistered."""

    name: str
    key: str
    offset: int
    byte_size: int
    descriptor: int


def is_loopback(host: str) -> bool:
    """Whether a peer's address is this host's own."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


class Regions:
    """Those of one frontend, whichever client registered them; owned by one event loop."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._regions: dict[str, Region] = {}

    @property
    def on(self) -> bool:
        return bool(self._prefix)

    def check_peer(self, host: str) -> None:
        """Raises ``UnsupportedOperation`` unless regions are used here, by this host's own clients."""
        if not self._prefix:
            raise UnsupportedOperation("shared memory is off; --kserve-shared-memory PREFIX turns it on")
        if not is_loopback(host):
            raise UnsupportedOperation("shared memory is for clients of this host, by its loopback address")

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Raises ``InvalidInput`` naming what is wrong; a name that is taken keeps its region."""
        if not name or len(name) > _NAME_CHARACTERS:
            raise InvalidInput(f"name: expected 1 to {_NAME_CHARACTERS} characters", param="name")
        said = clip(name)
        if name in self._regions:
            raise InvalidInput(f"the region {said!r} is registered already", param="name")
        if len(self._regions) >= _MOST_REGIONS:
            raise InvalidInput(f"{_MOST_REGIONS} regions are registered already", param="name")
        plain = key.removeprefix("/")
        if not plain.startswith(self._prefix) or "/" in plain or "\0" in plain or len(plain) > 255:
            raise InvalidInput(
                f"key: expected a name in /dev/shm that begins with {self._prefix}", param="key"
            )
        if offset < 0 or byte_size <= 0:
            raise InvalidInput(
                "byte_size: expected more than 0, and an offset of 0 or more", param="byte_size"
            )
        descriptor = -1
        try:
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(_FOLDER / plain, flags)
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.getuid(), os.geteuid()):
                raise InvalidInput("key: it is no file of this service's own user", param="key")
            if offset + byte_size > found.st_size:
                raise InvalidInput(
                    f"byte_size: offset and size end at {offset + byte_size}, behind the file's "
                    f"{found.st_size} bytes",
                    param="byte_size",
                )
        except OSError as error:
            raise InvalidInput(
                f"key: {clip(key)!r} cannot be opened: {error.strerror}", param="key"
            ) from None
        except InvalidInput:
            os.close(descriptor)
            raise
        self._regions[name] = Region(
            name=name, key=key, offset=offset, byte_size=byte_size, descriptor=descriptor
        )

    def unregister(self, name: str) -> None:
        """Without a name all of them; one that is not there is no error, as in Triton."""
        for region in [self._regions[name]] if name in self._regions else [] if name else self.regions(""):
            del self._regions[region.name]
            os.close(region.descriptor)

    def regions(self, name: str) -> list[Region]:
        """Without a name all of them; raises ``InvalidInput`` for one that is not there."""
        if not name:
            return list(self._regions.values())
        return [self._find(name, "name")]

    def read(self, parameters: Mapping[str, Parameter], param: str) -> bytes:
        """The bytes that an input's parameters name."""
        region, offset, size = self._place(parameters, param)
        data = os.pread(region.descriptor, size, region.offset + offset)
        if len(data) != size:
            raise InvalidInput(f"{param}: the region {clip(region.name)!r} was shortened", param=param)
        return data

    def write(self, parameters: Mapping[str, Parameter], param: str, data: bytes) -> None:
        """Write an output where its parameters say."""
        region, offset, size = self._place(parameters, param)
        if len(data) > size:
            raise InvalidInput(
                f"{param}: the output has {len(data)} bytes, its place in the region {size}", param=param
            )
        if os.fstat(region.descriptor).st_size < region.offset + offset + size:
            raise InvalidInput(f"{param}: the region {clip(region.name)!r} was shortened", param=param)
        os.pwrite(region.descriptor, data, region.offset + offset)

    def check_place(self, parameters: Mapping[str, Parameter], param: str) -> None:
        """Raises ``InvalidInput`` before anything is computed."""
        self._place(parameters, param)

    def _place(self, parameters: Mapping[str, Parameter], param: str) -> tuple[Region, int, int]:
        region = self._find(str(parameters.get(REGION, "")), param)
        offset, size = parameters.get(OFFSET, 0), parameters.get(SIZE)
        whole = isinstance(offset, int) and isinstance(size, int)
        if not whole or not offset >= 0 or not size > 0 or offset + size > region.byte_size:  # type: ignore[operator]
            raise InvalidInput(
                f"{param}: {SIZE} and {OFFSET} are not within the region's {region.byte_size} bytes",
                param=param,
            )
        return region, int(offset), int(size)  # type: ignore[arg-type]

    def _find(self, name: str, param: str) -> Region:
        if (region := self._regions.get(name)) is None:
            raise InvalidInput(f"{param}: the region {clip(name)!r} is not registered", param=param)
        return region
