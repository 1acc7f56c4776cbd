"""A family whose text module fails as devices do, with the exceptions that torch raises for it.

What it does is decided by the bytes of the text: ``\\x01`` is an illegal access and ``\\x04`` a hang, each of
them once for a directory of marks that the environment names; ``\\x03`` is poison every time. More than two
sequences at a time do not fit its memory. ``\\x05`` and ``\\x06`` are device-side asserts, once each, which a
card reports later: the batch is launched, and from then on every batch's event raises when it is queried.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera.launched import Launched
from tessera.models.base import TextTensors
from tessera.rows import Rows
from tests.families.dual_encoder import DualEncoder
from tests.families.seeded import SeededFamily

if TYPE_CHECKING:
    from tessera.engine.batch import TextBatch

ILLEGAL_ACCESS, POISON, HANG = "\x01", "\x03", "\x04"
ASSERTS = ("\x05", "\x06")
MARKS = "TEST_MARKS"


def _first_time(what: str) -> bool:
    try:
        (Path(os.environ[MARKS]) / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class _Asserted:
    """An event whose first queries come before the device has reached the assert."""

    def __init__(self) -> None:
        self._queries = 0

    def query(self) -> bool:
        self._queries += 1
        if self._queries > 3:
            self.synchronize()
        return False

    def synchronize(self) -> None:
        import torch

        raise torch.AcceleratorError("CUDA error: device-side assert triggered")


def _launch_as_a_card() -> None:
    """Have the torch engine's batches end by an event once an assert is among them."""
    from tessera.engine.torch.text import TorchTextEngine

    launch = TorchTextEngine.launch
    asserted: list[str] = []

    def launched(self: TorchTextEngine, batch: TextBatch) -> Launched[Rows]:
        found = set(batch.input_ids.tolist())
        asserted.extend(
            fault for fault in ASSERTS if ord(fault) in found and _first_time(f"assert {ord(fault)}")
        )
        made = launch(self, batch)
        return Launched.after(_Asserted(), made.result, keep=batch) if asserted else made

    TorchTextEngine.launch = launched  # type: ignore[method-assign]


class FaultyEncoder(DualEncoder):
    def load_text(self, *, dtype: str, device: str) -> Any:
        import torch

        _launch_as_a_card()
        forward = super().load_text(dtype=dtype, device=device)

        def failing(batch: TextTensors) -> torch.Tensor:
            lengths = batch.lengths
            found = set(batch.input_ids.tolist())
            if ord(ILLEGAL_ACCESS) in found and _first_time("illegal access"):
                raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
            if ord(HANG) in found and _first_time("hang"):
                time.sleep(600)
            if len(lengths) > 2 and lengths[0] != 8:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            if ord(POISON) in found:
                raise RuntimeError("the input cannot be computed")
            made: torch.Tensor = forward(batch)
            return made

        return failing


FAMILY = SeededFamily("faulty", FaultyEncoder)
