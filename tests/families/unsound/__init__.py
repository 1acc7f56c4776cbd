"""A family whose weights are damaged in places: what an input becomes is decided by its bytes and colours.

A text with ``\\x01`` is no number, one with ``\\x02`` is longer than float32 can square, one of ``\\x03``
alone is zero, and one with ``\\x04`` is sound, but beyond float16 unless it is scaled. Red overflows.
"""

from __future__ import annotations

import numpy as np

from tests.families.dual_encoder import SIZE, DualEncoder
from tests.families.seeded import SeededFamily

NOT_A_NUMBER, TOO_LONG, ZERO, LARGE = "\x01", "\x02", "\x03", "\x04"


class UnsoundEncoder(DualEncoder):
    def weights(self) -> dict[str, np.ndarray]:
        found = super().weights()
        tokens = found["tokens"]
        for byte, value in ((NOT_A_NUMBER, np.nan), (TOO_LONG, 1e25), (ZERO, 0.0), (LARGE, 1e6)):
            tokens[ord(byte)] = value
        found["pixels"][: SIZE * SIZE] = 3e38
        return found


FAMILY = SeededFamily("unsound", UnsoundEncoder)
