"""Regions of shared memory that clients of this host registered: inputs are read there, outputs written.

Off without a prefix, which every key of the system's memory begins with. A card's memory has no keys: whoever
knows its handle was given it. With API keys a region, and the memory below it, is its key's alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from tessera.errors import DeadlineExceeded, InvalidInput, UnsupportedOperation
from tessera.frontend.api.values import clip
from tessera.tasks import Deadline
from tessera.turns import Threads
from tessera_kserve.call import REGION, Call, Parameter
from tessera_kserve.shared_memory.cuda import CudaMemory
from tessera_kserve.shared_memory.memory import Lost, Memory
from tessera_kserve.shared_memory.system import SystemMemory
from tessera_kserve.tensors import Tensor, of_raw

SIZE: Final = "shared_memory_byte_size"
OFFSET: Final = "shared_memory_offset"

_MOST_REGIONS: Final = 1024
_NAME_CHARACTERS: Final = 200
_THREADS: Final = 4
_FACTOR: Final = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """``byte_size`` bytes of a client's memory; ``client`` is empty where there are no API keys."""

    client: str
    name: str
    byte_size: int
    memory: Memory

    @property
    def described(self) -> dict[str, str | int]:
        """Its fields in an answer."""
        return {"name": self.name, **self.memory.described, "byte_size": self.byte_size}


def _share(free: int, mine: int) -> int:
    """Return what a key may have that has ``mine``: four times what it leaves free, as in ``Budget``.

    A first region has to keep to that, too: regions stay for as long as their key likes.
    """
    return _FACTOR * max(0, free + mine) // (_FACTOR + 1)


@contextmanager
def _there(region: Region, param: str) -> Iterator[None]:
    """Raise ``InvalidInput`` naming ``param`` where the region's memory is lost."""
    try:
        yield
    except Lost as lost:
        raise InvalidInput.at(param, f"the region {clip(region.name)!r} {lost}") from None


def is_loopback(host: str) -> bool:
    """Whether a peer's address is this host's own."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


class Regions:
    """Holds those of one frontend, of whichever kind, by client and name: names are of both kinds.

    ``client`` is the name of an API key, and empty where there are none: all share what is registered then. A
    key neither sees nor uses another one's regions, and has a share of their number and of the bytes of each
    place. What waits is for the event loop; all else may run on any thread, and is run by ``aside`` where it
    opens, copies or closes memory. Tensors of a call take ``most_bytes`` at most.
    """

    def __init__(self, prefix: str, most_bytes: int = 1 << 30) -> None:
        self._prefix = prefix
        self._most_bytes = most_bytes
        self._regions: dict[tuple[str, str], Region] = {}
        # Those whose memory is being opened: a card's first takes a second, in which other keys register.
        self._opening: set[tuple[str, str]] = set()
        self._changing = threading.Lock()
        self._threads = Threads(_THREADS, "shared-memory")

    @property
    def on(self) -> bool:
        return bool(self._prefix)

    def check_peer(self, host: str) -> None:
        """Raises ``UnsupportedOperation`` unless regions are used here, by this host's own clients."""
        if not self._prefix:
            raise UnsupportedOperation("shared memory is off; --kserve-shared-memory PREFIX turns it on")
        if not is_loopback(host):
            raise UnsupportedOperation("shared memory is for clients of this host, by its loopback address")

    async def aside(self, client: str, deadline: Deadline, work: Callable[..., T], *args: object) -> T:
        """Run it on a thread, in the client's turn; raises ``DeadlineExceeded``.

        A card's first region takes as long as a context there, which may be a second, and a copy waits for
        whatever else the card runs: the event loop would stand still. The threads are the regions' own, so
        that a card that hangs takes none that other calls need.
        """
        try:
            async with asyncio.timeout(deadline.left()):
                return await self._threads.run(partial(work, *args), client)
        except TimeoutError:
            raise DeadlineExceeded("the shared memory was not ready in time") from None

    def register_system(self, client: str, name: str, key: str, offset: int, byte_size: int) -> None:
        """Raises ``InvalidInput`` naming what is wrong; a name that is taken keeps its region."""
        open_ = partial(SystemMemory.open, key, offset, byte_size, prefix=self._prefix)
        self._register(client, name, byte_size, open_)

    def register_cuda(
        self, client: str, name: str, raw_handle: bytes, device_id: int, byte_size: int
    ) -> None:
        """As ``register_system``; the name is any, because ``perf_analyzer`` chooses its own."""
        open_ = partial(CudaMemory.open, raw_handle, device_id, byte_size, region=clip(name))
        self._register(client, name, byte_size, open_)

    def _register(self, client: str, name: str, byte_size: int, open_: Callable[[], Memory]) -> None:
        if not name or len(name) > _NAME_CHARACTERS:
            raise InvalidInput.at("name", f"expected 1 to {_NAME_CHARACTERS} characters")
        if byte_size <= 0:
            raise InvalidInput.at("byte_size", "expected more than 0")
        with self._changing:
            self._check_number(client, name)
            self._opening.add((client, name))
        try:
            region = Region(client=client, name=name, byte_size=byte_size, memory=open_())
            with self._changing:
                refusal = self._refusal(region) if client else None
                if refusal is None:
                    self._regions[client, name] = region
            if refusal is not None:
                # Closed by this thread, and not by the one that handles the error.
                del region
                raise refusal
        finally:
            with self._changing:
                self._opening.discard((client, name))

    def _check_number(self, client: str, name: str) -> None:
        """Raise ``InvalidInput`` for a name that is taken, and where there is no room for one more."""
        names = [*self._regions, *self._opening]
        if (client, name) in names:
            raise InvalidInput(f"the region {clip(name)!r} is registered already", param="name")
        if len(names) >= _MOST_REGIONS:
            raise InvalidInput(f"{_MOST_REGIONS} regions are registered already", param="name")
        mine = sum(owner == client for owner, _ in names)
        share = _share(_MOST_REGIONS - len(names), mine)
        if client and mine >= share:
            raise InvalidInput(f"this API key has {mine} regions, all of its share", param="name")

    def _refusal(self, region: Region) -> InvalidInput | None:
        """Return the error of memory that is another key's, or more than the key's share of its place."""
        client, memory = region.client, region.memory
        beside = [other for other in self._regions.values() if other.memory.place == memory.place]
        if any(other.client != client and other.memory.identity == memory.identity for other in beside):
            return InvalidInput(
                f"the region {clip(region.name)!r} is memory that another API key has registered",
                param="name",
            )
        used = sum(other.byte_size for other in beside)
        mine = sum(other.byte_size for other in beside if other.client == client)
        share = _share(memory.place_bytes() - used, mine)
        if mine + region.byte_size <= share:
            return None
        return InvalidInput.at(
            "byte_size",
            f"regions of this API key may have {share} bytes of {memory.place} in all, and have {mine}",
        )

    def unregister(self, client: str, kind: type[Memory], name: str) -> None:
        """Without a name all of the kind; one that is not there is no error, as in Triton."""
        with self._changing:
            for region in self._of(client, kind):
                if name in ("", region.name):
                    del self._regions[client, region.name]

    def regions(self, client: str, kind: type[Memory], name: str) -> Sequence[Region]:
        """Of a kind, without a name all of them; raises ``InvalidInput`` for one that is not there."""
        listed = [region for region in self._of(client, kind) if name in ("", region.name)]
        if name and not listed:
            raise InvalidInput.at("name", f"the region {clip(name)!r} is not registered")
        return listed

    def _of(self, client: str, kind: type[Memory]) -> list[Region]:
        return [
            region
            for region in list(self._regions.values())
            if region.client == client and isinstance(region.memory, kind)
        ]

    async def load(
        self, client: str, call: Call, deadline: Deadline, hold: Callable[[int], Awaitable[None]]
    ) -> Call:
        """Return the call with the inputs that it has in regions; the places of its outputs are checked.

        ``hold`` waits for room for their bytes. Raises ``InvalidInput``, ``UnsupportedOperation`` and
        ``DeadlineExceeded``.
        """
        places = call.output_places
        if not call.shared and not places:
            return call
        self.check_peer(call.peer)
        for name, place in places.items():
            self._place(client, place, name)
        total = call.nbytes
        for name, tensor in call.shared.items():
            total += self._place(client, tensor.parameters, name)[2]
            if total > self._most_bytes:
                raise InvalidInput.at(name, f"a call has {self._most_bytes} bytes at most")
        if not call.shared:
            return call
        await hold(total - call.nbytes)
        return await self.aside(client, deadline, self._loaded, client, call, total)

    def _loaded(self, client: str, call: Call, nbytes: int) -> Call:
        loaded = {
            name: of_raw(name, tensor.datatype, tensor.shape, self.read(client, tensor.parameters, name))
            for name, tensor in call.shared.items()
        }
        return dataclasses.replace(call, inputs={**call.inputs, **loaded}, shared={}, nbytes=nbytes)

    async def store(self, client: str, call: Call, outputs: Sequence[Tensor], deadline: Deadline) -> None:
        """Write the outputs that the call wants in regions; raises as ``load`` does."""
        places = call.output_places
        wanted = [tensor for tensor in outputs if tensor.name in places]

        def store() -> None:
            for tensor in wanted:
                self.write(client, places[tensor.name], tensor.name, tensor.raw())

        if wanted:
            await self.aside(client, deadline, store)

    def read(self, client: str, parameters: Mapping[str, Parameter], param: str) -> bytes | memoryview:
        """Return the bytes that an input's parameters name."""
        region, offset, size = self._place(client, parameters, param)
        with _there(region, param):
            return region.memory.read(offset, size)

    def write(self, client: str, parameters: Mapping[str, Parameter], param: str, data: bytes) -> None:
        """Write an output where its parameters say."""
        region, offset, size = self._place(client, parameters, param)
        if len(data) > size:
            raise InvalidInput.at(param, f"the output has {len(data)} bytes, its place in the region {size}")
        with _there(region, param):
            region.memory.write(offset, data)

    def close(self) -> None:
        """Let go of all memory; what is under way keeps its own until it is done."""
        self._threads.close()
        self._regions.clear()

    def _place(self, client: str, parameters: Mapping[str, Parameter], param: str) -> tuple[Region, int, int]:
        name = str(parameters.get(REGION, ""))
        if (region := self._regions.get((client, name))) is None:
            raise InvalidInput.at(param, f"the region {clip(name)!r} is not registered")
        offset, size = parameters.get(OFFSET, 0), parameters.get(SIZE)
        whole = isinstance(offset, int) and isinstance(size, int)
        if not whole or not offset >= 0 or not size > 0 or offset + size > region.byte_size:  # type: ignore[operator]
            raise InvalidInput.at(
                param,
                f"{SIZE} and {OFFSET} are not within the {region.byte_size} bytes of the region "
                f"{clip(name)!r}",
            )
        return region, int(offset), int(size)  # type: ignore[arg-type]
