"""A family whose text module fails as devices do, with the exceptions that torch raises for it.

What it does is decided by the bytes of the text: ``\\x01`` is an illegal access and ``\\x04`` a hang, each of
them once for a directory of marks that the environment names; ``\\x03`` is poison every time. More than two
sequences at a time do not fit its memory.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.families.dual_encoder import DualEncoder

ILLEGAL_ACCESS, POISON, HANG = "\x01", "\x03", "\x04"
MARKS = "TESSERA_TEST_MARKS"


def _first_time(what: str) -> bool:
    try:
        (Path(os.environ[MARKS]) / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class FaultyEncoder(DualEncoder):
    def load_text(self, *, dtype: str, device: str) -> Any:
        import torch

        forward = super().load_text(dtype=dtype, device=device)

        def failing(input_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
            lengths = rest[2]
            found = set(input_ids.tolist())
            if ord(ILLEGAL_ACCESS) in found and _first_time("illegal access"):
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
            if ord(HANG) in found and _first_time("hang"):
                time.sleep(600)
            if len(lengths) > 2 and lengths[0] != 8:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            if ord(POISON) in found:
                raise RuntimeError("the input cannot be computed")
            made: torch.Tensor = forward(input_ids, *rest)
            return made

        return failing


class FaultyFamily:
    """Implements ``tessera.models.base.Family``."""

    name = "faulty"
    model_types = ("test_faulty",)

    def open_model(self, path: Path, options: Mapping[str, object]) -> FaultyEncoder:
        return FaultyEncoder(path, json.loads((path / "config.json").read_text())["seed"])


FAMILY = FaultyFamily()
