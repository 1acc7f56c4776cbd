"""NVIDIA's perf_analyzer, with the command lines by which the Triton deployments were measured.

``PERF_ANALYZER`` names an executable in place of the one that ``scripts/clients`` gets.
"""

from __future__ import annotations

import csv
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.kserve import computed, make_rows, perf_analyzer, write_data

from tessera.models import open_model
from tests.clients.environment import clients_environment
from tests.e2e.disaggregated import Disaggregated
from tests.e2e.kserve import Door, kserve_frontend

pytestmark = [
    pytest.mark.service,
    pytest.mark.kserve,
    pytest.mark.installs,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("shared-service"),
]

ZERO = (
    *("--shape", "pixel_values:3,256,256", "--shape", "input_ids:1024", "--shape", "attention_mask:1024"),
    *("--input-data", "zero"),
)


@pytest.fixture(scope="module")
def perf() -> str:
    return os.environ.get("PERF_ANALYZER") or str(clients_environment("perf") / "bin" / "perf")


@pytest.fixture(scope="module")
def door(service: Disaggregated) -> Iterator[Door]:
    with kserve_frontend(service) as door:
        yield door


def run(perf: str, door: Door, *flags: str, out: Path, transport: str = "grpc") -> list[dict[str, str]]:
    """The rows of its CSV."""
    command = [perf, "-m", "router", "-i", transport, "-u", getattr(door, transport), *flags]
    # Any three windows will do.
    command += ["--measurement-mode", "count_windows", "--measurement-request-count", "20"]
    command += ["--stability-percentage", "999", "--max-trials", "3", "-f", str(out)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return list(csv.DictReader(out.read_text().splitlines()))


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_the_zero_form_runs_and_computes_nothing(
    perf: str, door: Door, tmp_path: Path, transport: str
) -> None:
    before = computed(f"http://{door.http}")
    rows = run(
        *(perf, door, *ZERO, "-b", "1", "--concurrency-range", "1:5:4"),
        out=tmp_path / "out.csv",
        transport=transport,
    )
    assert {row["Concurrency"] for row in rows} == {"1", "5"}
    assert all(float(row["Inferences/Second"]) > 0 for row in rows)
    # Statistics were found.
    assert all(float(row["Server Compute Input"]) > 0 for row in rows)
    assert computed(f"http://{door.http}") == before


def test_batches_and_streams(perf: str, door: Door, tmp_path: Path) -> None:
    (row,) = run(perf, door, *ZERO, "-b", "8", out=tmp_path / "batches.csv")
    assert float(row["Inferences/Second"]) > 0
    (row,) = run(perf, door, *ZERO, "--streaming", "--async", out=tmp_path / "stream.csv")
    assert float(row["Inferences/Second"]) > 0


def test_texts_of_a_data_file_are_all_computed(
    perf: str, door: Door, checkpoint: Path, tmp_path: Path
) -> None:
    rows = make_rows(open_model(checkpoint), count=256, tokens=64, least=32, images=False)
    assert len({ids.tobytes() for ids in rows.ids}) == 256
    data = tmp_path / "rows.json"
    write_data(rows, data)
    before = computed(f"http://{door.http}")
    point = perf_analyzer(
        *(perf, door.grpc, data),
        at_once=4,
        answers=20,
        out=tmp_path / "out.csv",
        metrics=f"http://{door.http}/metrics",
    )
    after = computed(f"http://{door.http}")
    assert point.rate > 0
    asked = after["rows"] - before["rows"]
    assert asked >= point.rows > 0
    assert 32 * asked <= after["text"] - before["text"] <= 64 * asked
    assert after["image"] == before["image"]


def test_pixels_of_a_data_file_are_all_computed(
    perf: str, service: Disaggregated, checkpoint: Path, tmp_path: Path
) -> None:
    model = open_model(checkpoint)
    assert model.vision is not None
    each = model.vision.rows(1)
    rows = make_rows(model, count=8, tokens=each + 16, least=each + 8, images=True)
    data = tmp_path / "rows.json"
    write_data(rows, data)
    with kserve_frontend(service) as door:
        point = perf_analyzer(perf, door.grpc, data, at_once=2, answers=20, out=tmp_path / "out.csv")
        found = computed(f"http://{door.http}")
    assert found["rows"] >= point.rows > 0
    assert found["image"] == each * found["rows"]
    # The shared service has a cache, and there are only eight of them.
    assert found["image"] - found["cached"] >= each * len(rows.ids)
