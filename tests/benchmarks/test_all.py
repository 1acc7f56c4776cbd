"""One command for all figures of a card: it goes on where it stopped, and nothing outlives its time."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest
from benchmarks.all import BENCHMARKS, Benchmark
from benchmarks.proc import below

from benchmarks import all as everything

pytestmark = pytest.mark.measures


def test_it_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = "engine --seconds 0.01 --no-check --only text"
    for name, benchmark in {
        "good": Benchmark(quick, 300),
        "bad": Benchmark(f"{quick} --config {tmp_path}/nowhere", 300),
        "long": Benchmark("http --seconds 600 --workloads text-32@1 --no-engine", 8),
        "peer": Benchmark("peer", 300, vllm=True),
        "cards": Benchmark("engine", 300, cards=1000),
        "late": Benchmark("engine", 3000),
    }.items():
        monkeypatch.setitem(everything.BENCHMARKS, name, benchmark)  # type: ignore[arg-type]
    # Services that other tests of this process share.
    others = set(below(os.getpid()))
    options = ["--size", "tiny", "--limit", "1000", "--out", str(tmp_path / "out"), "--only"]
    assert everything.main([*options, "good", "bad", "long", "peer", "cards", "late"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[1:7] == [
        "good: well",
        "bad: with 1, see bad.log",
        "long: out of time",
        "peer: not begun: it needs --vllm",
        "cards: not begun: it needs 1000 cards",
        "late: not begun: 3000 s are wanted, " + said[6].rpartition(", ")[2],
    ]
    assert "nowhere" in (tmp_path / "out/bad.log").read_text()
    assert (tmp_path / "out/good/engine.csv").read_text().count("text") > 2
    assert set(below(os.getpid())) <= others
    assert (tmp_path / "out/about.txt").read_text().startswith("commit: ")
    assert everything.main([*options, "good"]) == 0
    assert "good: well before" in capsys.readouterr().out


@pytest.mark.parametrize("name", BENCHMARKS)
def test_its_words_are_understood(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = BENCHMARKS[name]
    name, *words = benchmark.words.split()
    module = importlib.import_module(f"benchmarks.{name}")
    words += ["--out", str(tmp_path)]
    words += ["--model-path", str(tmp_path)] if benchmark.family is not None else []
    words += ["--size", "full"] if benchmark.sized else []
    words += ["--vllm", str(tmp_path), "--vllm-python", "python3"] if benchmark.vllm else []
    with pytest.raises(SystemExit):
        module.main([*words, "--no-such-option"])
    assert capsys.readouterr().err.endswith("unrecognized arguments: --no-such-option\n")
