"""The device and the element type that an engine runs with; decided once, when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tessera.dtypes import DTYPES
from tessera.engine.settings import EngineSettings
from tessera.errors import ConfigError

CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """``device`` is cpu, cuda or cuda:N, ``dtype`` float32, bfloat16 or float16; auto has been resolved."""

    device: str
    dtype: str
    torch_dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "torch_dtype", DTYPES[self.dtype].torch)

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")

    def rows(self, count: int, width: int) -> torch.Tensor:
        """Allocate ``[count, width]``, not filled."""
        return torch.empty(count, width, dtype=self.torch_dtype, device=self.device)

    def host_rows(self, count: int, width: int) -> torch.Tensor:
        """Allocate float32 ``[count, width]`` of host memory, to which a device copies in its turn."""
        return torch.empty(count, width, pin_memory=self.is_cuda)


def place(settings: EngineSettings) -> Placement:
    """Resolve ``auto``; raises ``ConfigError`` for a CUDA device that is not there."""
    device, dtype = device_named(settings.device), settings.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    return Placement(device=device, dtype=dtype)


def device_named(device: str) -> str:
    """Resolve ``auto``; raises ``ConfigError`` for a CUDA device that is not there."""
    has_cuda = torch.cuda.is_available()
    if device == "auto":
        device = "cuda" if has_cuda else "cpu"
    if device.startswith("cuda") and not has_cuda:
        raise ConfigError(
            f"device {device!r} was asked for, but torch {torch.__version__} finds no CUDA device:"
            " use device auto or cpu, or a machine with one and a torch with CUDA"
        )
    if not (device == "cpu" or device == "cuda" or device.removeprefix("cuda:").isdigit()):
        raise ConfigError(f"device {device!r} is none of auto, cpu, cuda, cuda:N")
    if device.startswith("cuda:") and int(device.removeprefix("cuda:")) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {device!r} was asked for, of {torch.cuda.device_count()} visible ones: the launcher "
            "gives each worker a GPU, as TESSERA_AGG_CUDA_VISIBLE_DEVICES (ENCODE, EMBED) says"
        )
    return device


def capability(device: str) -> str:
    """``cpu``, or the compute capability of a CUDA device, such as 9.0."""
    if not device.startswith("cuda"):
        return CPU
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}.{minor}"
