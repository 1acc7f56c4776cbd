"""Sizing: the model against what was measured of both stages together, and what the command says."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tessera_tools.sizing import H200, Demand, Images, Plan, Rates, Text, demand, main, plan

RESULTS = (Path(__file__).parents[2] / "benchmarks/RESULTS.md").read_text()
ENGINES = RESULTS.partition("### llama-nemotron-embed-vl-1b-v2, engines in process\n")[2].partition("\n### ")[
    0
]


def measured(row: str) -> float:
    """The rate that the table of the engines gives."""
    (line,) = [line for line in ENGINES.splitlines() if line.startswith(f"| {row} |")]
    return float(line.split("|")[3].replace(",", ""))


def test_the_rates_are_the_ones_that_were_measured() -> None:
    assert H200.units == measured("vision, 28 images 512\u00d7512")
    for length, row in (
        (32, "text, 512 \u00d7 32 tokens"),
        (128, "text, 128 \u00d7 128 tokens"),
        (1024, "text, 16 \u00d7 1024 tokens"),
    ):
        assert H200.sequences[length] == measured(row)


@pytest.mark.parametrize(
    ("row", "units", "tokens"),
    [
        ("image 512\u00d7512 + text, both stages", 1, 8),
        ("page 1275\u00d71650 + text, both stages", 7, 4),
    ],
)
def test_both_stages_together_take_what_was_measured(row: str, units: int, tokens: int) -> None:
    """Rows of the table that the rates were not taken from."""
    work = demand(H200, [], [Images(1.0, units, tokens)], hits=0.0)
    assert 1 / (work.encode + work.embed) == pytest.approx(measured(row), rel=0.06)


def test_a_hit_needs_no_encoder() -> None:
    miss = demand(H200, [], [Images(10, 7, 4)], hits=0.0)
    half = demand(H200, [], [Images(10, 7, 4)], hits=0.5)
    hit = demand(H200, [], [Images(10, 7, 4)], hits=1.0)
    assert half.encode == pytest.approx(miss.encode / 2)
    assert hit.encode == 0 and plan(hit, 0.7).encode == 0
    assert miss.embed == half.embed == hit.embed


def test_longer_texts_never_cost_less() -> None:
    costs = [H200.sequence_seconds(length) for length in range(1, 8193)]
    assert all(later >= earlier > 0 for earlier, later in itertools.pairwise(costs))
    assert H200.sequence_seconds(128) == pytest.approx(1 / 2602)


@pytest.mark.parametrize(
    ("encode", "embed", "busy", "expected"),
    [
        (0.7, 0.7, 0.7, Plan(1, 1, 2)),
        (0.0, 0.01, 0.7, Plan(0, 1, 1)),
        (0.2, 0.2, 0.7, Plan(1, 1, 1)),
        (3.0, 1.1, 1.0, Plan(3, 2, 5)),
    ],
)
def test_workers_are_whole(encode: float, embed: float, busy: float, expected: Plan) -> None:
    assert plan(Demand(encode, embed, 1.0), busy) == expected


def test_every_kind_of_text_counts() -> None:
    both = demand(H200, [Text(100, 32), Text(50, 1024)], [], hits=0.0)
    assert both.embed == pytest.approx(100 / 10446 + 50 / 297)
    assert both.inputs == 150


def test_the_command_prints_workers_ratio_and_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--text", "500@128", "--images", "40@7+4", "--hits", "0.3", "--gpu-hour", "2.5"]) == 0
    said = capsys.readouterr().out
    assert "RESULTS.md" in said
    counts = {name: int(count) for name, count in re.findall(r"(encode|embed) workers: (\d+)", said)}
    # 40 pages: 196 tiles a second of 560, and 0.24 s of text; 500 texts: 0.19 s. At most 0.7 s a worker.
    assert counts == {"encode": 1, "embed": 1}
    # 2 GPUs, 540 inputs a second.
    assert "5.00 an hour, 2.57 a million inputs" in said


def test_own_rates_take_the_place_of_the_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rates.yaml"
    path.write_text("source: my card\nunits: 10\nrows_per_unit: 256\nsequences: {32: 100, 1024: 5}\n")
    assert main(["--images", "10@7", "--rates", str(path)]) == 0
    said = capsys.readouterr().out
    assert "rates: my card" in said and "encode workers: 10" in said


def test_patches_are_less_than_a_row_each() -> None:
    rates = Rates(source="x", sequences={100: 10.0, 200: 5.0}, units=1000.0, rows_per_unit=0.25)
    work = demand(rates, [], [Images(2.0, 400, 100)], hits=0.5)
    # 100 rows and 100 tokens take 0.2 s; 400 patches 0.4 s, where they are not in the cache.
    assert (work.embed, work.encode) == pytest.approx((0.4, 0.4))


def test_a_model_of_text_alone_has_no_rate_of_units(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rates.yaml"
    path.write_text("source: text alone\nsequences: {32: 100, 1024: 5}\n")
    assert main(["--text", "70@32", "--rates", str(path)]) == 0
    assert "encode workers: 0\nembed workers: 1" in capsys.readouterr().out
    assert main(["--images", "1@1", "--rates", str(path)]) == 1
    assert "text alone: images need units" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"units: 5\n", "source"),
        (b"source: x\nunits: 0\nrows_per_unit: 1\nsequences: {1: 1, 2: 1}\n", "units"),
        (b"source: x\nunits: 5\nsequences: {1: 1, 2: 1}\n", "rows_per_unit"),
        (b"source: x\nunits: 1\nrows_per_unit: .nan\nsequences: {1: 1, 2: 1}\n", "rows_per_unit"),
        (b"source: x\nsequences: {1: .inf, 2: 1}\n", "rates"),
        (b"\xd0\x00", "YAML"),
    ],
)
def test_wrong_rates_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, named: str
) -> None:
    path = tmp_path / "rates.yaml"
    path.write_bytes(content)
    assert main(["--text", "1@5", "--rates", str(path)]) == 1
    said = capsys.readouterr().err
    assert str(path) in said and named in said


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--text"),
        (["--text", "5"], "RATE@TOKENS"),
        (["--text", "1.2.3@4"], "RATE@TOKENS"),
        (["--images", "0@1"], "RATE@UNITS"),
        (["--text", "1@1", "--busy", "0"], "--busy"),
    ],
)
def test_what_is_no_mix_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert named in capsys.readouterr().err.splitlines()[-1]
