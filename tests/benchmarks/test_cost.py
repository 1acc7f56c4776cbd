"""What a request costs, by process and part, beside the least that it can."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.figure import figure


@pytest.mark.service
@pytest.mark.measures
def test_parts_of_a_service_beside_the_floor(tmp_path: Path) -> None:
    words = ["--inputs", "tile", "--concurrency", "4", "--clients", "1", "--decoders", "1"]
    words += ["--warm", "0.1", "--seconds", "1", "--out", str(tmp_path)]
    # By itself: it looks at all services of its process, and other tests here keep some.
    subprocess.run([sys.executable, "-m", "benchmarks.cost", *words], check=True, timeout=300)
    with (tmp_path / "cost.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = [(row["input"], row["at once"], row["service"]) for row in rows]
    assert found == [("tile", loop, service) for loop in "14" for service in ("floor", "bare", "this")]
    assert all(figure(row["p50 ms"]) > 0 and figure(row["CPU ms"]) > 0 for row in rows)
    with (tmp_path / "cost-this.csv").open() as file:
        parts = list(csv.DictReader(file))
    assert {row["process"] for row in parts} == {"frontend", "worker", "decoders", ""}
    assert {"event loop", "engine-text", "Dynamo's runtime"} <= {row["part"] for row in parts}
    decoding = next(row for row in parts if row["process"] == "decoders")
    assert figure(decoding["tile @4"]) > 0


@pytest.mark.service
@pytest.mark.measures
@pytest.mark.parametrize(
    "what",
    [
        "bytecodes",
        pytest.param(
            "instructions",
            marks=pytest.mark.skipif(not shutil.which("valgrind"), reason="valgrind is not installed"),
        ),
    ],
)
def test_what_a_frontend_does_is_counted(tmp_path: Path, what: str) -> None:
    words = ["--inputs", "text-32", "tile", f"--{what}", "10", "--counts", "1", "--out", str(tmp_path)]
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.cost", *words], check=True, timeout=600, stdout=subprocess.PIPE
    )
    with (tmp_path / f"{what}.csv").open() as file:
        counts = {row["input"]: figure(row["median, million"]) for row in csv.DictReader(file)}
    assert set(counts) == {"text-32", "tile"} and min(counts.values()) > 0
    # A file of 50 kB in base64 is more work than 32 tokens. Instructions count what waits for time as well:
    # on a busy machine a text had more.
    assert what == "instructions" or counts["text-32"] < counts["tile"]
    assert (b"tessera/frontend/api/endpoint.py:Endpoint.answer" in ran.stdout) == (what == "bytecodes")
