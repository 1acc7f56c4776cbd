"""A run that is stopped goes on exactly where it was, and leaves whole files whenever it ends."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training.checkpoint import DEMO, write_settings
from training.deadline import Deadline
from training.train import Run, parse

from tests.waiting import wait_until

pytestmark = pytest.mark.trains

TINY = replace(
    DEMO,
    vision_hidden=32,
    vision_layers=1,
    vision_heads=1,
    vision_intermediate=32,
    hidden=64,
    layers=1,
    heads=1,
    kv_heads=1,
    intermediate=64,
)
SMALL = ("--chunk", "8", "--chunks", "1", "--pool", "2", "--uses", "2", "--workers", "0", "--held-out", "1")
SIMPLE = ("--simple-steps", "4", "--no-compile")
"""Two chunks of pictures of one tile; then come all kinds, and pictures seen a second time."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("settings")
    write_settings(folder, TINY)
    return folder


@pytest.fixture
def _handlers() -> Iterator[None]:
    """Runs in this process take over its signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(out: Path, *arguments: str) -> dict[str, torch.Tensor]:
    """The weights that a run in this process leaves."""
    Run(parse(["--out", str(out), *SMALL, *SIMPLE, *arguments]), Deadline(None)).run()
    return load_file(out / "checkpoint" / "model.safetensors")


def prepared(out: Path, settings: Path) -> Path:
    (out / "checkpoint").mkdir(parents=True)
    for file in settings.iterdir():
        (out / "checkpoint" / file.name).write_bytes(file.read_bytes())
    return out


@pytest.mark.usefixtures("_handlers")
def test_a_resumed_run_ends_as_one_without_a_stop_does(tmp_path: Path, settings: Path) -> None:
    whole = run(prepared(tmp_path / "whole", settings), "--steps", "4", "--report-every", "2")
    parts = prepared(tmp_path / "parts", settings)
    half = run(parts, "--steps", "4", "--report-every", "2", "--stop-after", "2")
    resumed = run(parts, "--steps", "4", "--report-every", "2")
    assert any(not torch.equal(half[name], whole[name]) for name in whole)
    for name, weight in whole.items():
        assert torch.equal(resumed[name], weight), name
    rows = list(csv.DictReader((parts / "log.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["step"] for row in rows] == ["2", "4"]

    # A new run that begins with a checkpoint has its weights, and its log if there is one beside them.
    (parts / "checkpoint" / "log.csv").write_bytes((parts / "log.csv").read_bytes())
    options = ["--out", str(tmp_path / "next"), "--start", str(parts / "checkpoint"), *SMALL, *SIMPLE]
    following = Run(parse(options), Deadline(None))
    assert (following.step, [report.step for report in following.reports]) == (4, [2, 4])
    for name, weight in following.network.stored().items():
        assert torch.equal(weight.to(torch.bfloat16), whole[name]), name


def test_a_run_that_is_told_to_end_has_written_everything(tmp_path: Path, settings: Path) -> None:
    out = prepared(tmp_path, settings)
    options = ["--out", str(out), *SMALL, *SIMPLE, "--steps", "1000000", "--save-every", "0"]
    with subprocess.Popen([sys.executable, "-m", "training.train", *options]) as process:
        wait_until((out / "state.pt").exists, process=process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    state = torch.load(out / "state.pt", weights_only=False)
    assert state["step"] > 0
    assert not list(out.rglob("*.new"))
    stored = load_file(out / "checkpoint" / "model.safetensors")
    name = "language_model.norm.weight"
    assert torch.equal(stored[name], state["network"]["text.norm.weight"].to(torch.bfloat16))


def test_minutes_count_from_the_start_of_the_process() -> None:
    program = (
        "import time; time.sleep(0.5)\n"
        "from training.deadline import Deadline\n"
        "left = Deadline(1.0).left\n"
        "assert 0 < left <= 59.5, left"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
