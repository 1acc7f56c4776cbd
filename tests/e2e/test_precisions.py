"""Workers of one checkpoint that go over to another precision, one at a time, while they are asked."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.e2e.inputs import parts
from tests.e2e.several import Several, several
from tests.waiting import wait_until

pytestmark = pytest.mark.service

NAME = "rolled"
# As long as the other worker takes to start where others use the machine.
SECONDS = 120


def vector(running: Several, given: Any = "a yellow heart") -> np.ndarray:
    answer = running.post("/v1/embeddings", model=NAME, input=[given])
    assert answer.status_code == 200, answer.text
    return np.array(answer.json()["data"][0]["embedding"])


def wait(running: Several, *precisions: str) -> None:
    """Until the model's card has a worker of each of these precisions, and of no other."""

    def found() -> list[str]:
        vector(running)
        card = httpx.get(f"{running.url}/v1/models/{NAME}").json()
        return sorted(f"{kind['dtype']} {kind['rounding']}".rstrip() for kind in card["precision"])

    wait_until(lambda: found() == list(precisions), SECONDS, process=running.workers[NAME], said=found)


def apart(found: np.ndarray, exact: np.ndarray) -> bool:
    cosine = float(exact @ found / np.linalg.norm(exact) / np.linalg.norm(found))
    return 0.99 < cosine < 0.9999999


def end(worker: subprocess.Popen[bytes]) -> None:
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=SECONDS) == 0


def test_vectors_of_one_precision_are_not_kept_for_another(
    checkpoint: Path, photos: dict[str, bytes], tmp_path: Path
) -> None:
    """Neither when the second comes and the first goes, nor when the first comes back.

    Nor where one stage alone has another precision.
    """
    image = parts(None, photos["flower"])
    coarse = json.dumps({stage: {"dtype": "bfloat16"} for stage in ("vision", "text")})
    mixed = json.dumps({"vision": {"dtype": "bfloat16"}})
    with several(tmp_path, {NAME: checkpoint}, "--result-cache-mb", "4") as running:
        wait(running, "float32")
        exact, seen, first = vector(running), vector(running, image), running.workers[NAME]
        second = running.start_worker(NAME, checkpoint, "--override-engine-args", coarse)
        wait(running, "bfloat16", "float32")
        end(first)
        wait(running, "bfloat16")
        assert apart(vector(running), exact)
        third = running.start_worker(NAME, checkpoint, "--override-engine-args", mixed)
        wait(running, "bfloat16", "float32 bfloat16;")
        end(second)
        wait(running, "float32 bfloat16;")
        assert apart(vector(running, image), seen)
        last = running.start_worker(NAME, checkpoint)
        wait(running, "float32", "float32 bfloat16;")
        end(third)
        wait(running, "float32")
        assert np.array_equal(vector(running), exact)
        assert np.array_equal(vector(running, image), seen)
        assert last.poll() is None
