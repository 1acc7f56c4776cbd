"""``tessera bench`` against the shared service: a table, exact texts without a checkpoint, and refusals."""

from __future__ import annotations

import base64
import csv
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import orjson
import pytest

from tessera_tools import bench
from tessera_tools.load.bodies import WORKLOADS, Bodies, Body, HttpWorkload
from tessera_tools.load.clients import Load, Plan, _Load
from tessera_tools.load.words import CheckpointWords, ServedWords
from tests.e2e.disaggregated import Disaggregated
from tests.figure import figure


@pytest.mark.service
@pytest.mark.xdist_group("shared-service")
def test_a_running_service_is_measured(
    service: Disaggregated,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TESSERA_API_KEY", service.key)
    words = ["--url", service.url, "--workloads", "text-32", "tile", "--clients", "1", "--concurrency", "2"]
    status = bench.main([*words, "--seconds", "1", "--warm", "0.2", "--csv", str(tmp_path / "table.csv")])
    said = capsys.readouterr()
    assert status == 0, said.err
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["workload"], row["errors"]) for row in rows] == [("text-32", "0"), ("tile", "0")]
    assert all(figure(row["requests/s"]) > 0 for row in rows)
    assert said.out.startswith("workload")
    monkeypatch.setenv("TESSERA_API_KEY", "sk-unknown-0123456")
    assert bench.main(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "answered 401" in line and "TESSERA_API_KEY" in line


def test_texts_of_a_service_have_the_tokens_they_claim(checkpoint: Path) -> None:
    known = CheckpointWords(checkpoint)

    def tokens(texts: Sequence[str]) -> list[int]:
        return [known.tokens(text) for text in texts]

    words = ServedWords.ask(tokens)
    workload = HttpWorkload(name="text", tokens=40)
    for body in islice(Bodies(workload, words, "m", seed=1, variety=8), 8):
        text = body.data.decode().partition('"input": "')[2].removesuffix('"}')
        assert known.tokens(text) == 40 and len(set(text.split())) > 4


def test_a_tokenizer_without_words_is_named() -> None:
    with pytest.raises(ValueError, match="no word is one token"):
        ServedWords.ask(lambda texts: [3 * len(text) for text in texts])


def test_nothing_that_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--url", "http://127.0.0.1:1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tessera bench: no answer from http://127.0.0.1:1/v1/models: ")


@pytest.mark.parametrize("flags", [["--concurrency", "0"], ["--workloads", "nothing"], ["--rate", "x"]])
def test_flags_that_make_no_sense(flags: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(flags)


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_vectors_of_tokens_are_checked_row_by_row(tmp_path: Path, encoding: str) -> None:
    load = Load(
        words=CheckpointWords(tmp_path), model_name="m", clients=1, warm=0, seconds=1, encoding=encoding
    )
    plan = Plan(
        load=load, urls=("http://x",), workload=WORKLOADS["text-32"], concurrency=1, rate=None, seed=0
    )
    checking = _Load(plan, iter(()), 0.0)

    def good(*matrices: np.ndarray) -> bool:
        rows = [
            {"embedding": matrix.tolist()}
            if encoding == "float"
            else {"embedding": base64.b64encode(matrix.tobytes()).decode(), "shape": matrix.shape}
            for matrix in matrices
        ]
        return checking._good(Body(data=b"", key=1, inputs=2), orjson.dumps({"data": rows}))

    first, second = np.eye(5, dtype="<f4")[:3], np.eye(5, dtype="<f4")[3:]
    assert good(first, second) and good(first, second)
    assert not good(first, second[:1]) and not good(first[::-1].copy(), second)
    assert not good(first, 2 * second) and not good(first)
