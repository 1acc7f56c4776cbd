"""Regions of shared memory that clients of this host registered: inputs are read there, outputs written.

Off without a prefix, which every key of the system's memory begins with. A card's memory has no keys: whoever
knows its handle was given it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, TypeVar

from tessera.errors import DeadlineExceeded, InvalidInput, UnsupportedOperation
from tessera.frontend.api.values import clip
from tessera.tasks import Deadline
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

M = TypeVar("M", bound=Memory)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Region(Generic[M]):
    """``byte_size`` bytes of a client's memory."""

    name: str
    byte_size: int
    memory: M


def is_loopback(host: str) -> bool:
    """Whether a peer's address is this host's own."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


class Regions:
    """Those of one frontend, whichever client registered them and of whichever kind: names are of both.

    What waits is for the event loop; all else may run on any thread, and is run by ``aside`` where it opens,
    copies or closes memory. Tensors of a call take ``most_bytes`` at most.
    """

    def __init__(self, prefix: str, most_bytes: int = 1 << 30) -> None:
        self._prefix = prefix
        self._most_bytes = most_bytes
        self._regions: dict[str, Region[Memory]] = {}
        self._changing = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="shared-memory")

    @property
    def on(self) -> bool:
        return bool(self._prefix)

    def check_peer(self, host: str) -> None:
        """Raises ``UnsupportedOperation`` unless regions are used here, by this host's own clients."""
        if not self._prefix:
            raise UnsupportedOperation("shared memory is off; --kserve-shared-memory PREFIX turns it on")
        if not is_loopback(host):
            raise UnsupportedOperation("shared memory is for clients of this host, by its loopback address")

    async def aside(self, deadline: Deadline, work: Callable[..., T], *args: object) -> T:
        """Run it on a thread; raises ``DeadlineExceeded``.

        A card's first region takes as long as a context there, which may be a second, and a copy waits for
        whatever else the card runs: the event loop would stand still. The threads are the regions' own, so
        that a card that hangs takes none that other calls need.
        """
        run = partial(copy_context().run, work, *args)
        try:
            async with asyncio.timeout(deadline.left()):
                return await asyncio.get_running_loop().run_in_executor(self._threads, run)
        except TimeoutError:
            raise DeadlineExceeded("the shared memory was not ready in time") from None

    def register_system(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Raises ``InvalidInput`` naming what is wrong; a name that is taken keeps its region."""
        open_ = partial(SystemMemory.open, key, offset, byte_size, prefix=self._prefix)
        self._register(name, byte_size, open_)

    def register_cuda(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> None:
        """As ``register_system``; the name is any, because ``perf_analyzer`` chooses its own."""
        open_ = partial(CudaMemory.open, raw_handle, device_id, byte_size, region=clip(name))
        self._register(name, byte_size, open_)

    def _register(self, name: str, byte_size: int, open_: Callable[[], Memory]) -> None:
        if not name or len(name) > _NAME_CHARACTERS:
            raise InvalidInput(f"name: expected 1 to {_NAME_CHARACTERS} characters", param="name")
        if byte_size <= 0:
            raise InvalidInput("byte_size: expected more than 0", param="byte_size")
        with self._changing:
            if name in self._regions:
                raise InvalidInput(f"the region {clip(name)!r} is registered already", param="name")
            if len(self._regions) >= _MOST_REGIONS:
                raise InvalidInput(f"{_MOST_REGIONS} regions are registered already", param="name")
            self._regions[name] = Region(name=name, byte_size=byte_size, memory=open_())

    def unregister(self, kind: type[Memory], name: str) -> None:
        """Without a name all of the kind; one that is not there is no error, as in Triton."""
        with self._changing:
            for region in self._of(kind):
                if name in ("", region.name):
                    del self._regions[region.name]

    def regions(self, kind: type[M], name: str) -> Sequence[Region[M]]:
        """Of a kind, without a name all of them; raises ``InvalidInput`` for one that is not there."""
        found = [region for region in self._of(kind) if name in ("", region.name)]
        if name and not found:
            raise InvalidInput(f"name: the region {clip(name)!r} is not registered", param="name")
        return found

    def _of(self, kind: type[M]) -> list[Region[M]]:
        return [region for region in list(self._regions.values()) if isinstance(region.memory, kind)]  # type: ignore[misc]

    async def load(self, call: Call, deadline: Deadline) -> Call:
        """The call with the inputs that it has in regions; the places of its outputs are checked.

        Raises ``InvalidInput``, ``UnsupportedOperation`` and ``DeadlineExceeded``.
        """
        places = call.output_places
        if not call.shared and not places:
            return call
        self.check_peer(call.peer)
        for name, place in places.items():
            self._place(place, name)
        total = call.nbytes
        for name, one in call.shared.items():
            total += self._place(one.parameters, name)[2]
            if total > self._most_bytes:
                raise InvalidInput(f"{name}: a call has {self._most_bytes} bytes at most", param=name)
        if not call.shared:
            return call
        return await self.aside(deadline, self._loaded, call, total)

    def _loaded(self, call: Call, nbytes: int) -> Call:
        found = {
            name: of_raw(name, one.datatype, one.shape, self.read(one.parameters, name))
            for name, one in call.shared.items()
        }
        return dataclasses.replace(call, inputs={**call.inputs, **found}, shared={}, nbytes=nbytes)

    async def store(self, call: Call, outputs: Sequence[Tensor], deadline: Deadline) -> None:
        """Write the outputs that the call wants in regions; raises as ``load`` does."""
        places = call.output_places
        wanted = [tensor for tensor in outputs if tensor.name in places]

        def store() -> None:
            for tensor in wanted:
                self.write(places[tensor.name], tensor.name, tensor.raw())

        if wanted:
            await self.aside(deadline, store)

    def read(self, parameters: Mapping[str, Parameter], param: str) -> bytes | memoryview:
        """The bytes that an input's parameters name."""
        region, offset, size = self._place(parameters, param)
        try:
            return region.memory.read(offset, size)
        except Lost as lost:
            raise InvalidInput(f"{param}: the region {clip(region.name)!r} {lost}", param=param) from None

    def write(self, parameters: Mapping[str, Parameter], param: str, data: bytes) -> None:
        """Write an output where its parameters say."""
        region, offset, size = self._place(parameters, param)
        if len(data) > size:
            raise InvalidInput(
                f"{param}: the output has {len(data)} bytes, its place in the region {size}", param=param
            )
        try:
            region.memory.write(offset, data)
        except Lost as lost:
            raise InvalidInput(f"{param}: the region {clip(region.name)!r} {lost}", param=param) from None

    def close(self) -> None:
        """Let go of all memory; what is under way keeps its own until it is done."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._regions.clear()

    def _place(self, parameters: Mapping[str, Parameter], param: str) -> tuple[Region[Memory], int, int]:
        name = str(parameters.get(REGION, ""))
        if (region := self._regions.get(name)) is None:
            raise InvalidInput(f"{param}: the region {clip(name)!r} is not registered", param=param)
        offset, size = parameters.get(OFFSET, 0), parameters.get(SIZE)
        whole = isinstance(offset, int) and isinstance(size, int)
        if not whole or not offset >= 0 or not size > 0 or offset + size > region.byte_size:  # type: ignore[operator]
            raise InvalidInput(
                f"{param}: {SIZE} and {OFFSET} are not within the {region.byte_size} bytes of the region "
                f"{clip(name)!r}",
                param=param,
            )
        return region, int(offset), int(size)  # type: ignore[arg-type]
