"""A real device-side assert, which the host learns of when it queries a launched batch's event."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("count", [1, 64], ids=["one in flight", "full"])
def test_every_batch_is_settled_and_the_engine_is_dead(count: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    # In a process of its own: nothing more runs in its context.
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gpu.device_assert", str(count)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    seen = json.loads(ended.stdout.splitlines()[-1])
    assert seen["right"], "a batch before it was computed"
    assert seen["open"], "the batch was under way when it had been launched"
    assert seen["ended"] == ["EngineDead"] * count, seen["messages"]
    assert len(seen["died"]) == 1 and "device-side assert" in seen["died"][0], seen
    assert seen["later"] == "EngineDead"
