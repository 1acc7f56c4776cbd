"""A batch launched on the current CUDA stream."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class EventLaunched:
    """Done when its event has passed; ``keep`` holds what the copies read until then."""

    event: torch.cuda.Event
    keep: tuple[object, ...]
    host: torch.Tensor | None = None

    @classmethod
    def record(cls, *, keep: tuple[object, ...], host: torch.Tensor | None = None) -> EventLaunched:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return cls(event, keep, host)

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def result(self) -> npt.NDArray[np.float32]:
        """The pinned host copy, if one was asked for; empty otherwise."""
        self.event.synchronize()
        return np.empty((0, 0), np.float32) if self.host is None else self.host.numpy()
