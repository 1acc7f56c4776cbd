"""Where this process runs, as far as reaching a peer's memory depends on it."""

from __future__ import annotations

import functools
import os
from pathlib import Path


@functools.cache
def host_id() -> str:
    """The same for two processes that can open each other's descriptors below ``/proc``.

    That takes one kernel, one process namespace and one user; a host name promises none of them.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}:{os.getuid()}"


@functools.cache
def device_ids() -> tuple[str, ...]:
    """UUIDs of the CUDA devices that this process sees, in the order of their indices."""
    # A frontend asks for its host alone, and has no torch.
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count()))
