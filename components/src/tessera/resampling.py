"""Resizing as Pillow does, to the bit, in a third of its time, where ``resampling.c`` was compiled.

setuptools does that when the package is built, if there is a C compiler: ``_resampling.abi3.so`` lies beside
this file. It needs nothing of Python, so that one serves all versions. Of 512 x 512 pixels it makes
224 x 224 (bicubic) in 0.73 ms, where Pillow takes 2.7.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

log = logging.getLogger(__name__)

REACHES: Final = {Image.Resampling.BILINEAR: 1, Image.Resampling.BICUBIC: 2}
"""The filters that it knows, and how far they reach, in pixels of the result."""

_LIBRARY: Final = Path(__file__).with_name("_resampling.abi3.so")


@cache
def compiled() -> ctypes.CDLL | None:
    """Return what has ``resizes`` and ``resize``, of levels (``imaging.Levels``); None where Pillow resizes.

    Ask before a process is confined. The first time it is compared with the Pillow that is installed. Why it
    is None is logged.
    """
    try:
        library = ctypes.CDLL(str(_LIBRARY))
        resizes, resize = library.resizes, library.resize
    except (OSError, AttributeError) as error:
        log.info("images are resized by Pillow, at three times the time: %s", error)
        return None
    sizes = [ctypes.c_int64] * 2
    levels = np.ctypeslib.ndpointer(np.uint32, ndim=2, flags="C_CONTIGUOUS")
    resizes.argtypes = [*sizes, *sizes]
    resize.argtypes = [levels, *sizes, levels, *sizes, ctypes.c_int]
    if not _as_pillow(library):
        log.info("images are resized by Pillow, at three times the time: it differs from %s", _LIBRARY.name)
        return None
    return library


def _as_pillow(library: ctypes.CDLL) -> bool:
    """Whether it makes of noise what Pillow does, smaller and larger."""
    noise = np.random.default_rng(0).integers(0, 256, (61, 83, 4), np.uint8)
    image = Image.fromarray(noise[..., :3])
    for width, height in ((29, 17), (83, 9), (128, 100)):
        made = np.empty((height, width, 4), np.uint8)
        for resample, reach in REACHES.items():
            levels = made.view("<u4")[..., 0]
            library.resize(noise.view("<u4")[..., 0], 83, 61, levels, width, height, reach)
            if not np.array_equal(made[..., :3], np.asarray(image.resize((width, height), resample))):
                return False
    return True
