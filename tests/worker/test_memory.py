"""The memory account: what it says, when it refuses, and how near its estimates are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tessera.errors import ConfigError
from tessera.worker.memory import MemoryAccount, free_bytes

pytestmark = pytest.mark.starts

MIB = 1 << 20

MEASURE = """
import re, sys
import numpy as np, torch
from tessera.models import open_model
from tessera.models.base import TextTensors

torch.set_num_threads(1)
model = open_model(sys.argv[1])

def status(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def grown(run):
    run(1)
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    run(SIZE)
    return status("VmHWM") - before

with torch.inference_mode():
    if sys.argv[2] == "vision":
        SIZE = 32
        module = model.load_vision(dtype="float32", device="cpu")
        pixels = torch.randint(0, 255, (SIZE, *model.vision.unit_shape), dtype=torch.uint8)
        places = torch.empty((0, SIZE), dtype=torch.int32)
        def run(n):
            bounds = torch.arange(n + 1, dtype=torch.int32)
            module(pixels[:n], places[:, :n], bounds, [1] * n)
        print(grown(run), model.vision_activation_nbytes("float32", SIZE))
    else:
        SIZE = 16
        module = model.load_text(dtype="float32", device="cpu")
        def run(n):
            ids = torch.zeros(n * 1024, dtype=torch.int32)
            positions = torch.arange(1024, dtype=torch.int32).repeat(n)[None]
            bounds = torch.arange(0, n * 1024 + 1, 1024, dtype=torch.int32)
            none = torch.empty(0, dtype=torch.int32)
            rows = torch.empty(0, model.vision.row_width)
            module(TextTensors(ids, positions, bounds, [1024] * n, rows, none))
        print(grown(run), model.text_activation_nbytes("float32", SIZE * 1024))
"""


@pytest.mark.parametrize("stage", ["vision", "text"])
def test_activation_estimates_are_near_what_a_forward_pass_takes(checkpoint: Path, stage: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(checkpoint), stage], capture_output=True, text=True, check=True
    )
    measured, estimated = map(int, done.stdout.split())
    print(f"{stage}: measured {measured / MIB:.0f} MiB, estimated {estimated / MIB:.0f} MiB")
    assert 0.4 * estimated < measured < 2.0 * estimated


def test_what_fits_is_shown() -> None:
    account = MemoryAccount()
    account.add("weights", "cpu", 10 * MIB)
    account.add("cache", "cpu", 1024 * MIB)
    table = account.check()
    assert "weights" in table and "1.00 GiB" in table and "fits" in table


def test_what_does_not_fit_is_refused_with_the_table() -> None:
    account = MemoryAccount()
    account.add("weights", "cpu", free_bytes("cpu") * 2)
    with pytest.raises(ConfigError, match="does not fit") as caught:
        account.check()
    assert "weights" in caught.value.message


def test_a_worker_that_cannot_fit_does_not_load(checkpoint: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tessera.worker", "--model-path", str(checkpoint)),
            *("--multimodal-embedding-cache-capacity-gb", "100000"),
        ],
        capture_output=True,
        text=True,
        env={"DYN_FILE_KV": str(tmp_path), "PATH": "/usr/bin:/bin"},
        timeout=180,
    )
    assert done.returncode == 1
    assert "cache of vision rows" in done.stderr and "does not fit" in done.stderr
    assert "loaded the" not in done.stderr
