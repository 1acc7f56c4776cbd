"""``tessera embed`` as a command: what it writes, how it ends, and that kills change nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from benchmarks.corpus import Corpus, differences, killed, make_corpus, pdf, read, whole
from benchmarks.proc import below

from tests.proc import title
from tests.tessera_corpus.command import EMBED, embed, served

# Parts that may come of what was embedded before an engine was killed.
_IN_FLIGHT = 3

pytestmark = [pytest.mark.embeds, pytest.mark.xdist_group("corpus"), pytest.mark.usefixtures("forks")]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For every engine: two cores have those of four tests at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    # More than two parts of pictures, each of one tile: seven runs embed all of it.
    return make_corpus(tmp_path_factory.mktemp("corpus"), texts=240, pictures=12, pages=12, square=True)


@pytest.fixture(scope="module")
def unbroken(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken")
    whole(corpus, out, [])
    return out


def test_a_run_that_is_killed_three_times_writes_what_an_unbroken_one_does(
    corpus: Corpus, unbroken: Path, tmp_path: Path
) -> None:
    flags = ["--part-rows", "10"]
    assert killed(corpus, tmp_path / "killed", flags, kills=3, most=0.5) == 3
    wrong, cosine, _ = differences(unbroken, tmp_path / "killed")
    assert not wrong and cosine >= 0.9999
    assert len(read(unbroken)[0]) == corpus.items


def test_int8_is_within_one_step(corpus: Corpus, unbroken: Path, tmp_path: Path) -> None:
    embed(*corpus.sources, "--out", tmp_path, "--dtype", "int8")
    (ids, whole_vectors), (own, values) = read(unbroken), read(tmp_path)
    wanted = dict(zip(ids, whole_vectors, strict=True))
    for id, value in zip(own, values, strict=True):
        steps = wanted[id] * 127 / np.abs(wanted[id]).max()
        assert np.abs(value - steps).max() <= 1


def test_a_changed_file_is_done_again_and_nothing_else(tmp_path: Path) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.txt").write_text(f"a text of {name}")
    assert "3 items embedded" in embed(folder, "--out", out).stdout
    assert "0 items embedded" in embed(folder, "--out", out).stdout
    before = dict(zip(*read(out), strict=True))
    (folder / "b.txt").write_text("another text")
    (folder / "d.txt").write_text("a text of d")
    said = embed(folder, "--out", out).stdout
    assert "2 items embedded" in said and "2 done before" in said
    after = dict(zip(*read(out), strict=True))
    assert sorted(after) == ["a.txt", "b.txt", "c.txt", "d.txt"] and len(read(out)[0]) == 4
    assert (after["a.txt"] == before["a.txt"]).all() and not np.allclose(after["b.txt"], before["b.txt"])


def test_a_damaged_table_is_one_error_and_the_others_are_embedded(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.parquet" for number in range(3)]
    for path in paths:
        pq.write_table(pa.table({"text": [f"a text of {path.name}"]}), path)
    paths[1].write_bytes(paths[0].read_bytes()[:-20])
    ran = embed(*paths, "--out", tmp_path / "out", status=3)
    summary, first = ran.stdout.splitlines()
    assert "2 items embedded" in summary and "1 failed" in summary
    (error,) = pq.read_table(tmp_path / "out" / "errors.parquet").to_pylist()
    assert error["id"] == str(paths[1]) and first == f"what failed: {paths[1]}: {error['reason']}"
    assert sorted(read(tmp_path / "out")[0]) == [f"{paths[0]}:0", f"{paths[2]}:0"]


def test_what_fails_is_a_row_of_the_errors_and_the_status_says_so(tmp_path: Path) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    (folder / "good.txt").write_text("a text")
    (folder / "bad.png").write_bytes(b"no picture")
    (folder / "bad.pdf").write_bytes(b"%PDF-1.7 and nothing else")
    (folder / "long.txt").write_text("word " * 10_000)
    ran = embed(folder, "--out", out, status=3)
    summary, first = ran.stdout.splitlines()
    assert "1 items embedded" in summary and "3 failed" in summary
    errors = {row["id"]: row["reason"] for row in pq.read_table(out / "errors.parquet").to_pylist()}
    assert errors.keys() == {"bad.png", "bad.pdf", "long.txt"}
    assert first in {f"the first that failed: {name}: {reason}" for name, reason in errors.items()}
    assert "no image" in errors["bad.png"] and "tokens" in errors["long.txt"]
    (folder / "bad.pdf").unlink()
    (folder / "bad.png").unlink()
    embed(folder, "--out", out, "--truncate", "end", "--replace")
    assert not (out / "errors.parquet").exists() or not pq.read_table(out / "errors.parquet").num_rows
    (folder / "bad.png").write_bytes(b"no picture")
    (folder / "bad2.png").write_bytes(b"no picture")
    ran = embed(folder, "--out", out, "--truncate", "end", "--max-errors", "1", status=4)
    assert "--max-errors is 1" in ran.stderr


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["missing", "--out", "out"], 1, "missing: no such file or directory"),
        (["."], 2, "--out"),
        ([".", "--out", "out", "--nonsense"], 2, "no flag --nonsense"),
        ([".", "--out", "out", "--disaggregation-mode", "embed"], 2, "--split parts the stages"),
        ([".", "--out", "out", "--url", "http://127.0.0.1:9", "--split"], 1, "--split is for engines here"),
        ([".", "--out", "out", "--shard", "5/4"], 1, "--shard"),
        ([".", "--out", "out", "--dimensions", "7"], 1, "--dimensions 7"),
        ([".", "--out", "out", "--url", "http://127.0.0.1:9", "--patience-seconds", "0.1"], 1, "no answer"),
        (
            [".", "--out", "out", "--url", "http://127.0.0.1:9", "--patience-seconds", "2"],
            1,
            "asked again for 2 s (--patience-seconds)",
        ),
        ([".", "--out", "out", "--url", "http://127.0.0.1:9", "--card-share", "1"], 2, "--card-share"),
        ([".", "--out", "out", "--model", "no/such/model"], 1, "no/such/model"),
    ],
)
def test_what_cannot_be_begun_is_said(tmp_path: Path, words: Sequence[str], status: int, said: str) -> None:
    assert said in embed(*words, status=status, cwd=tmp_path).stderr


def test_progress_is_a_json_line_a_second_and_a_signal_keeps_what_is_done(
    corpus: Corpus, tmp_path: Path
) -> None:
    words = [*EMBED, *corpus.sources, "--out", str(tmp_path)]
    states = []
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("{"):
                states.append(json.loads(line))
            if states and states[-1]["embedded"]:
                process.send_signal(signal.SIGTERM)
                break
        rest = process.stderr.read()
        assert process.wait(60) == 143 and "goes on" in rest
    assert states[0].keys() >= {"embedded", "failed", "rate", "eta_seconds", "cache_hits", "limit"}
    assert len(read(tmp_path)[0]) >= states[-1]["embedded"]


# First the process that makes prompts, then the one that it asks; and the two that it asks.
@pytest.mark.parametrize(
    ("flags", "killed"),
    [
        ([], [("engine_process", 0), ("worker_process", 0)]),
        (["--split"], [("worker_process", 0), ("worker_process", 1)]),
    ],
    ids=["one worker", "a worker for each stage"],
)
def test_an_engine_that_is_killed_is_started_again_and_nothing_is_lost(
    corpus: Corpus, unbroken: Path, tmp_path: Path, flags: Sequence[str], killed: Sequence[tuple[str, int]]
) -> None:
    words = [*EMBED, *corpus.sources, "--out", str(tmp_path), "--part-rows", "10", *flags]
    left = list(killed)
    seen = 0
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as process:
        while left and process.poll() is None:
            parts = len(list((tmp_path / "vectors").glob("part-*")))
            module, place = left[0]
            found = sorted(child for child in below(process.pid) if module in title(child))
            # Since the last one was killed its replacement has embedded something.
            if parts > seen and len(found) > place:
                os.kill(found[place], signal.SIGKILL)
                del left[0]
                seen = parts + _IN_FLIGHT
            time.sleep(0.05)
        assert process.wait(300) == 0 and not left
    (ids, vectors), (own, others) = read(unbroken), read(tmp_path)
    assert len(own) == len(set(own)) == corpus.items
    wanted = dict(zip(ids, vectors, strict=True))
    assert min(vector @ wanted[id] for id, vector in zip(own, others, strict=True)) >= 0.9999


def test_a_dry_run_counts_and_writes_nothing(corpus: Corpus, tmp_path: Path) -> None:
    ran = embed(*corpus.sources, "--out", tmp_path / "out", "--dry-run", "--progress", "none")
    assert "264 items to embed" in ran.stdout and "240 texts at" in ran.stdout
    assert "24 pictures at" in ran.stdout
    assert re.fullmatch(r"[\d,]+ (seconds|minutes) and [\d.]+ KiB of vectors", ran.stdout.splitlines()[-1])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["parquet", "lance"])
def test_a_dry_run_leaves_out_what_is_done(tmp_path: Path, format: str) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text(f"a text of {name}")
    (folder / "d.pdf").write_bytes(pdf(["one", "two", "three"], square=True))
    words = [folder, "--out", out, "--format", format]
    embed(*words)
    (folder / "b.txt").write_text("another text")
    (folder / "c.txt").write_text("a text of c")
    before = sorted((path, path.stat().st_mtime_ns) for path in out.rglob("*"))
    ran = embed(*words, "--dry-run", "--progress", "none")
    assert "2 items to embed, 4 done before, 0 unreadable" in ran.stdout and "2 texts at" in ran.stdout
    assert "other vectors" in embed(*words, "--dry-run", "--truncate", "end", status=1).stderr
    ran = embed(*words, "--dry-run", "--truncate", "end", "--replace")
    assert "6 items to embed, 0 done before" in ran.stdout
    assert sorted((path, path.stat().st_mtime_ns) for path in out.rglob("*")) == before


def test_pages_of_a_pdf_by_picture_text_and_both(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(pdf(["one", "two"]))
    embed(tmp_path / "a.pdf", "--out", tmp_path / "image")
    assert read(tmp_path / "image")[0] == ["a.pdf#page=1", "a.pdf#page=2"]
    # These pages are pictures alone.
    embed(tmp_path / "a.pdf", "--out", tmp_path / "text", "--pdf", "text", status=3)
    assert pq.read_table(tmp_path / "text" / "errors.parquet").num_rows == 2
    embed(tmp_path / "a.pdf", "--out", tmp_path / "both", "--pdf", "both")
    assert len(read(tmp_path / "both")[0]) == 2


def test_standard_input_and_shards_of_one_output(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"id": f"{number}", "text": f"text {number}"}) + "\n" for number in range(40))
    for number in (1, 2):
        embed("-", "--out", tmp_path, "--shard", f"{number}/2", input=lines)
    ids = read(tmp_path)[0]
    assert sorted(ids, key=int) == [f"{number}" for number in range(40)]


def test_a_service_makes_the_same_vectors(corpus: Corpus, unbroken: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"no picture")
    with served(tmp_path) as url:
        words: list[str | Path] = [*corpus.sources, tmp_path / "bad.png"]
        ran = embed(*words, "--out", tmp_path / "out", "--url", url, status=3)
        assert "264 items embedded" in ran.stdout and "1 failed" in ran.stdout
        # One that is alone in its request has its reason, too.
        alone = embed(tmp_path / "bad.png", "--out", tmp_path / "alone", "--url", url, status=3)
        assert "what failed: bad.png: " in alone.stdout and "no image of a served format" in alone.stdout
    wrong, cosine, _ = differences(unbroken, tmp_path / "out")
    assert not wrong and cosine >= 0.9999
    (error,) = pq.read_table(tmp_path / "out" / "errors.parquet").to_pylist()
    assert "no image of a served format" in error["reason"]


def search(*words: str | Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tessera.cli", "search", *map(str, words)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == status, ran.stderr
    return ran


def test_what_was_embedded_is_found_by_picture_and_by_text(
    corpus: Corpus, unbroken: Path, tmp_path: Path
) -> None:
    picture = Path(corpus.sources[1]) / "7" / "7.jpg"
    first, second = search(unbroken, "--image", picture, "--top", "2").stdout.splitlines()
    assert first.split() == ["1.", "1.000", f"{corpus.sources[1]}/7/7.jpg"] and second.startswith("   2.")
    line = json.loads(Path(corpus.sources[0]).read_text().splitlines()[5])
    found, text = search(unbroken, line["text"], "--top", "1").stdout.splitlines()
    assert found.split()[0] == "1."
    assert corpus.sources[0] in text and f"“{line['text'][:90]}" in text
    (result,) = json.loads(search(unbroken, line["text"], "--top", "1", "--json").stdout)["results"]
    assert (result["rank"], result["source"], result["page"]) == (1, f"{corpus.sources[0]}:6", None)
    assert result["id"] == found.split()[2] and result["text"] == line["text"][:600]
    assert "give a text" in search(unbroken, status=1).stderr
    (wrong,) = search(unbroken, "a", "--tops", "1", status=2).stderr.splitlines()
    assert wrong.startswith("tessera search: unrecognized arguments: --tops") and "--help" in wrong
    assert "is not what tessera embed writes" in search(tmp_path, "text", status=1).stderr
