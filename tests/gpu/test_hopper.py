"""A Hopper GPU without its libraries is said once, with what brings them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

CODE = """
import logging, sys

class Nowhere:
    def find_spec(name, path=None, target=None):
        if name in {hidden!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Nowhere)
logging.basicConfig(format="%(message)s")
from tessera.engine.torch.cuda import advise
advise("cuda")
advise("cuda:0")
advise("cuda")
"""


def said(*hidden: str) -> list[str]:
    """What a process says of its GPU that cannot import these."""
    code = CODE.format(hidden=hidden)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [line for line in done.stderr.splitlines() if "faster with" in line]


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
def test_what_a_hopper_gpu_lacks_is_said_once() -> None:
    both = said("quack", "flash_attn", "flash_attn.cute")
    assert len(both) == 1
    assert both[0].startswith("a Hopper GPU is 7 to 12 % faster with quack-kernels and flash-attn-4: ")
    assert both[0].endswith("[cuda]'")
    alone = said("quack")
    assert len(alone) == 1 and "faster with quack-kernels" in alone[0]
