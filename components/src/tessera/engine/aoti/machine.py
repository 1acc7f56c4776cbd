"""What a machine is to AOTInductor, whose programs run on machines like the one that compiled them."""

from __future__ import annotations

from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch

from tessera.errors import EngineMismatch

CPU = "cpu"
FLAGS = "cpu_flags"
# Whose products a program calls back into Python for, if it was there when the program was compiled.
PRODUCTS = "quack-kernels"
_VECTOR_FLAGS = ("sse", "ssse", "avx", "fma", "f16c", "bmi", "amx", "vaes", "vpclmulqdq", "gfni", "popcnt")


def capability(device: str) -> str:
    """``cpu``, or the compute capability of a CUDA device, such as 9.0."""
    if not device.startswith("cuda"):
        return CPU
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}.{minor}"


def versions(device: str) -> dict[str, str]:
    """The libraries whose insides a compiled program calls, ``PRODUCTS`` only where it is installed."""
    found = {"torch": str(torch.__version__)}
    if device.startswith("cuda"):
        found["cuda"] = str(torch.version.cuda)
    with suppress(metadata.PackageNotFoundError):
        found[PRODUCTS] = metadata.version(PRODUCTS)
    return found


def cpu_flags() -> list[str]:
    """Vector instructions of this CPU as the kernel names them; empty where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return sorted(flag for flag in flags if flag.startswith(_VECTOR_FLAGS))


def require_cpu_flags(built: str, directory: Path) -> None:
    """Raises ``EngineMismatch`` naming what this CPU lacks: the program would be killed at the first one."""
    missing = sorted(set(built.split()) - set(cpu_flags()))
    if missing:
        raise EngineMismatch(
            f"{directory}: the engine does not match: it was built for a CPU with {' '.join(missing)},"
            " which this one lacks. tessera-engine build makes one for this machine"
        )
