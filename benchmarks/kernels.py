"""Which kernels a batch's time on the card goes to, as torch's profiler counts them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tessera.launched import Launched

_BATCHES = 5
_NAME = 100


def kernels(launch: Callable[[], Launched[object]], *, most: int = 14) -> list[tuple[str, float, float]]:
    """Return the dearest kernels, each with its milliseconds a batch and its share of all in percent.

    The last entry is what remains. A graph's kernels count as those outside of graphs do.
    """
    launch().result()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(_BATCHES):
            launch().result()
    times = {
        event.key: event.self_device_time_total / 1e3 / _BATCHES
        for event in profile.key_averages()
        if event.self_device_time_total
    }
    total = sum(times.values())
    dearest = sorted(times.items(), key=lambda entry: -entry[1])
    rows = [(name[:_NAME], time, 100 * time / total) for name, time in dearest[:most]]
    rest = sum(time for _, time in dearest[most:])
    return [*rows, ("the rest", rest, 100 * rest / total)]
