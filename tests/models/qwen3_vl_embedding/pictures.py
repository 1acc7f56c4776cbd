"""Images for tests."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from PIL import Image


def picture(width: int, height: int, *, mode: str = "RGB", seed: int = 0) -> bytes:
    """A PNG of coloured waves, so that neither halves nor channels nor neighbours are alike."""
    source = np.random.default_rng(seed)
    rows, columns = np.indices((height, width))
    waves = [
        127 * (1 + np.sin(rows * source.uniform(0.02, 0.3) + columns * source.uniform(0.02, 0.3) + channel))
        for channel in range(len(mode))
    ]
    file = BytesIO()
    Image.fromarray(np.stack(waves, axis=-1).astype(np.uint8), mode).save(file, "PNG")
    return file.getvalue()
