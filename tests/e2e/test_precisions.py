"""Workers of one checkpoint that go over to another precision, one at a time, while they are asked."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.e2e.several import Several, several
from tests.waiting import wait_until

pytestmark = pytest.mark.service

NAME = "rolled"
# As long as the other worker takes to start where others use the machine.
SECONDS = 120


def vector(running: Several) -> np.ndarray:
    answer = running.post("/v1/embeddings", model=NAME, input="a yellow heart")
    assert answer.status_code == 200, answer.text
    return np.array(answer.json()["data"][0]["embedding"])


def wait(running: Several, *dtypes: str) -> None:
    """Until the model's card has a worker of each of these types, and of no other."""

    def found() -> list[str]:
        vector(running)
        card = httpx.get(f"{running.url}/v1/models/{NAME}").json()
        return sorted(kind["dtype"] for kind in card["precision"])

    wait_until(lambda: found() == list(dtypes), SECONDS, process=running.workers[NAME], said=found)


def end(worker: subprocess.Popen[bytes]) -> None:
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=SECONDS) == 0


def test_vectors_of_one_precision_are_not_kept_for_another(checkpoint: Path, tmp_path: Path) -> None:
    """Neither when the second comes and the first goes, nor when the first comes back."""
    coarse = json.dumps({stage: {"dtype": "bfloat16"} for stage in ("vision", "text")})
    with several(tmp_path, {NAME: checkpoint}, "--result-cache-mb", "4") as running:
        wait(running, "float32")
        exact, first = vector(running), running.workers[NAME]
        second = running.start_worker(NAME, checkpoint, "--override-engine-args", coarse)
        wait(running, "bfloat16", "float32")
        end(first)
        wait(running, "bfloat16")
        rounded = vector(running)
        cosine = float(exact @ rounded / np.linalg.norm(exact) / np.linalg.norm(rounded))
        assert 0.99 < cosine < 0.9999999
        third = running.start_worker(NAME, checkpoint)
        wait(running, "bfloat16", "float32")
        end(second)
        wait(running, "float32")
        assert np.array_equal(vector(running), exact)
        assert third.poll() is None
