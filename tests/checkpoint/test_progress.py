"""What is said of bytes on their way: enough, and not more."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

import pytest

from tessera.checkpoint import progress as module
from tessera.checkpoint.progress import Progress
from tessera.models import open_model


def test_progress_says_little(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with caplog.at_level(logging.INFO):
        quick = Progress(logging.getLogger("x"), "quick", 1000)
        quick.add(1000)
        progress = Progress(logging.getLogger("x"), "loading", 2_000_000_000, done=1_000_000_000)
        for second in range(1, 1001):
            now = float(second)
            progress.add(1_000_000)
    lines = [record.message for record in caplog.records]
    assert lines[0] == "loading: 1.1 GB of 2.0 GB, 1.0 MB/s, 940 s left"
    assert 10 <= len(lines) <= 17 and not any("quick" in line for line in lines)


def test_weights_say_how_far_they_are(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_SECONDS", 0.0)
    with caplog.at_level(logging.INFO):
        open_model(checkpoint).load_text(dtype="float32", device="cpu")
    lines = [line for line in caplog.messages if line.startswith("loading weights of TextTower: ")]
    assert 3 <= len(lines) <= 10
    assert all(re.search(r": [\d.]+ [kM]B of [\d.]+ [kM]B, .*/s, \d+ s left$", line) for line in lines[:-1])
