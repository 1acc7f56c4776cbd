"""What a worker is going to use of memory, against what is there; worked out before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tessera.defaults import GIB, MIB
from tessera.errors import ConfigError
from tessera.machine import free_memory_bytes, memory_bytes

# What the interpreter, torch and its libraries take, measured on CPU; a CUDA context takes about as much
# again on the device.
RUNTIME_BYTES = 512 * MIB


@dataclass(frozen=True, slots=True)
class Use:
    """One line of the account; ``device`` is ``cpu`` or a CUDA device, ``nbytes`` what it will take there."""

    what: str
    device: str
    nbytes: int


class MemoryAccount:
    """Sums the uses of each device and compares them with what is free there."""

    def __init__(self) -> None:
        self.uses: list[Use] = []

    def add(self, what: str, device: str, nbytes: int) -> None:
        self.uses.append(Use(what, device, nbytes))

    def needed(self, device: str) -> int:
        return sum(use.nbytes for use in self.uses if use.device == device)

    @property
    def devices(self) -> list[str]:
        return list(dict.fromkeys(use.device for use in self.uses))

    def table(self, available: dict[str, int]) -> str:
        """One line for each use, and one for each device with what it needs and what is free."""
        lines = [f"  {use.what:<36} {use.device:<8} {use.nbytes / GIB:8.2f} GiB" for use in self.uses]
        for device in self.devices:
            needed, free = self.needed(device) / GIB, available[device] / GIB
            verdict = "fits" if needed <= free else "does not fit"
            lines.append(f"  {'in all':<36} {device:<8} {needed:8.2f} GiB of {free:.2f} GiB free: {verdict}")
        return "\n".join(lines)

    def check(self) -> str:
        """The table; raises ``ConfigError`` holding it when a device has not enough."""
        available = {device: free_bytes(device) for device in self.devices}
        table = self.table(available)
        if any(self.needed(device) > available[device] for device in self.devices):
            raise ConfigError(
                "this worker would not fit into memory; lower max_batch_cost, slab_mb or "
                f"--multimodal-embedding-cache-capacity-gb, or use a smaller dtype:\n{table}"
            )
        return table


def free_bytes(device: str) -> int:
    """Bytes that this process can still take on the device."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory_bytes()


def all_bytes(device: str) -> int:
    """Bytes of the device's memory that this process may use when nothing else does."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[1])
    return memory_bytes()
