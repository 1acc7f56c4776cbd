"""Outputs in Parquet: what is done, what a part holds, who may write, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tessera.errors import ConfigError, OutputFailed, TooManyFailures
from tessera.frontend.api.formats import convert
from tessera.frontend.request import EmbedDtype
from tessera.models.base import Role
from tessera_corpus.item import DUPLICATE, Failure
from tessera_corpus.output.errors import read_parquet
from tessera_corpus.output.openai import read_failures
from tessera_corpus.output.output import Output
from tessera_corpus.output.row import CHANGED
from tessera_corpus.output.settings import OutputSettings
from tessera_corpus.shard import Shard
from tests.tessera_corpus.output.made import (
    WIDTH,
    content_of,
    embedded,
    fill,
    kind_of,
    opened,
    rows_in,
    texts_in,
)

CORPUS = {f"file-{number}.txt": f"text {number}" for number in range(25)}


def test_what_is_published_is_done(tmp_path: Path) -> None:
    output = opened(tmp_path, part_rows=10)
    assert fill(output, CORPUS.items()) == list(CORPUS)
    assert output.failures == 0 and len(list(tmp_path.glob("vectors/*.parquet"))) == 3
    assert texts_in(tmp_path, CORPUS) == sorted(CORPUS)
    assert fill(opened(tmp_path), CORPUS.items()) == []


def test_an_exit_without_close_loses_what_is_not_published(tmp_path: Path) -> None:
    output = opened(tmp_path, part_rows=10)
    output.put([embedded(id, text) for id, text in CORPUS.items()])
    assert texts_in(tmp_path, CORPUS) == sorted(list(CORPUS)[:20])
    output._directory.close()
    assert fill(opened(tmp_path), CORPUS.items()) == list(CORPUS)[20:]
    assert texts_in(tmp_path, CORPUS) == sorted(CORPUS)


def test_a_changed_item_is_done_again(tmp_path: Path) -> None:
    fill(opened(tmp_path, part_rows=10), CORPUS.items())
    changed = CORPUS | dict.fromkeys(("file-3.txt", "file-4.txt", "file-12.txt"), "changed")
    assert fill(opened(tmp_path), changed.items()) == ["file-3.txt", "file-4.txt", "file-12.txt"]
    assert texts_in(tmp_path, changed) == sorted(changed)
    assert fill(opened(tmp_path), changed.items()) == []


def test_a_part_whose_rows_are_all_taken_out_goes(tmp_path: Path) -> None:
    fill(opened(tmp_path, part_rows=10), CORPUS.items())
    changed = {id: f"changed {text}" for id, text in CORPUS.items()}
    assert fill(opened(tmp_path), changed.items()) == list(CORPUS)
    assert texts_in(tmp_path, changed) == sorted(CORPUS)
    assert len(list(tmp_path.glob("vectors/*"))) == 1


@pytest.mark.parametrize("bound", [{"part_bytes": 4 * WIDTH}, {"part_seconds": 1e-9}])
def test_a_part_is_bounded_in_bytes_and_seconds(tmp_path: Path, bound: dict[str, Any]) -> None:
    output = opened(tmp_path, **bound)
    output.put([embedded("a", "1")])
    assert len(rows_in(tmp_path)) == 1
    output.close()


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("tokens", [False, True])
def test_columns(tmp_path: Path, dtype: str, tokens: bool) -> None:
    kind = kind_of(dtype=dtype, tokens=tokens, role=Role.PASSAGE, options={"max tokens": "9"})
    output = opened(tmp_path, kind=kind)
    items = [embedded("a", "1", rows=3 if tokens else 1), embedded("b", "2")]
    output.put(items)
    output.close()
    (part,) = tmp_path.glob("vectors/*")
    table = pq.read_table(part)
    element = {"float32": "float", "float16": "halffloat", "int8": "int8"}[dtype]
    inner = f"fixed_size_list<element: {element}>[{WIDTH}]"
    assert {field.name: str(field.type) for field in table.schema} == {
        "id": "string",
        "page": "int32",
        "source": "string",
        "content_hash": "binary",
        "model": "string",
        "fingerprint": "string",
        "warning": "string",
        "vector": f"list<element: {inner}>" if tokens else inner,
    }
    assert b'"fingerprint":"f"' in table.schema.metadata[b"tessera"]
    for item, row in zip(items, table.to_pylist(), strict=True):
        values = np.array(row.pop("vector"), dtype).reshape(-1, WIDTH)
        assert np.array_equal(values, convert(item.rows.values, EmbedDtype(dtype)))
        assert row == {
            "id": item.id,
            "page": None,
            "source": item.source,
            "content_hash": item.content_hash,
            "model": "m",
            "fingerprint": "f",
            "warning": None,
        }


@pytest.mark.parametrize("rows", [0, 2])
def test_vectors_of_another_shape_are_refused(tmp_path: Path, rows: int) -> None:
    output = opened(tmp_path)
    with pytest.raises(ValueError, match=f"a: vectors of shape \\({rows}, 8\\)"):
        output.put([embedded("a", "1", rows)])
    output.close()


OTHERS = {
    "model big, not m; fingerprint g, not f": kind_of(model="big", fingerprint="g"),
    f"model m, {CHANGED}; fingerprint g, not f": kind_of(fingerprint="g"),
    "width 9, not 8": kind_of(width=9),
    "tokens yes, not no": kind_of(tokens=True),
    "dtype int8, not float32": kind_of(dtype="int8"),
    "role query, not none": kind_of(role=Role.QUERY),
    "truncate end, not none": kind_of(options={"truncate": "end"}),
}


@pytest.mark.parametrize("said", OTHERS)
def test_vectors_of_another_kind_are_refused(tmp_path: Path, said: str) -> None:
    fill(opened(tmp_path), CORPUS.items())
    with pytest.raises(ConfigError) as refusal:
        opened(tmp_path, kind=OTHERS[said])
    assert f"wanted are {said}. " in str(refusal.value) and "--replace" in str(refusal.value)
    assert fill(opened(tmp_path), CORPUS.items()) == []


def test_another_name_of_the_same_model_goes_on(tmp_path: Path) -> None:
    fill(opened(tmp_path), CORPUS.items())
    assert fill(opened(tmp_path, kind=kind_of(model="alias")), CORPUS.items()) == []


def test_replace_moves_what_was_there(tmp_path: Path) -> None:
    fill(opened(tmp_path), CORPUS.items())
    other = kind_of(fingerprint="g")
    half = list(CORPUS.items())[:9]
    assert len(fill(opened(tmp_path, kind=other, replace=True), half)) == 9
    # The same command goes on.
    assert len(fill(opened(tmp_path, kind=other, replace=True), CORPUS.items())) == len(CORPUS) - 9
    assert texts_in(tmp_path, CORPUS) == sorted(CORPUS)
    assert {row["fingerprint"] for row in rows_in(tmp_path)} == {"g"}
    assert texts_in(tmp_path / "replaced-1", CORPUS) == sorted(CORPUS)
    # What was moved is an output itself.
    assert fill(opened(tmp_path / "replaced-1"), CORPUS.items()) == []
    assert not (tmp_path / "replaced-2").exists()


def test_replace_waits_for_no_other_run(tmp_path: Path) -> None:
    running = opened(tmp_path, shard=Shard(1, 2))
    with pytest.raises(ConfigError, match="other runs write"):
        opened(tmp_path, shard=Shard(2, 2), kind=kind_of(fingerprint="g"), replace=True)
    running.close()


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "vectors").mkdir()
    (tmp_path / "vectors" / "mine.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"holds files that no tessera\.json describes"):
        opened(tmp_path, replace=True)


def test_a_part_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    fill(opened(tmp_path), CORPUS.items())
    (part,) = tmp_path.glob("vectors/*")
    part.write_bytes(part.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=f"{part}: not a part"):
        opened(tmp_path)


def test_one_writer(tmp_path: Path) -> None:
    first = opened(tmp_path)
    with pytest.raises(ConfigError, match="another run writes here"):
        opened(tmp_path)
    first.close()
    opened(tmp_path).close()


def test_shards_write_side_by_side(tmp_path: Path) -> None:
    fill(opened(tmp_path, part_rows=7), CORPUS.items())
    changed = {id: f"changed {text}" for id, text in CORPUS.items()}
    shards = [Shard(number, 3) for number in (1, 2, 3)]
    outputs = [opened(tmp_path, shard=shard, part_rows=1) for shard in shards]
    for id, text in changed.items():
        for shard, output in zip(shards, outputs, strict=True):
            if shard.holds(id):
                assert not output.done(id, content_of(text))
                output.put([embedded(id, text)])
    for output in outputs:
        output.fail(Failure(id=f"failed {output._directory.shard}", source="s", reason="r"))
        output.close()
    assert texts_in(tmp_path, changed) == sorted(CORPUS)
    assert sorted(path.name for path in tmp_path.glob("errors*")) == [
        f"errors-{number}-of-3.parquet" for number in (1, 2, 3)
    ]
    assert fill(opened(tmp_path), changed.items()) == []


def test_shards_of_another_division_wait(tmp_path: Path) -> None:
    running = opened(tmp_path, shard=Shard(2, 3))
    with pytest.raises(ConfigError, match="shard 2-of-3 writes here"):
        opened(tmp_path)
    with pytest.raises(ConfigError, match="shard 2-of-3 writes here"):
        opened(tmp_path, shard=Shard(2, 4))
    running.close()


def test_leftovers_of_runs_that_ended_are_removed(tmp_path: Path) -> None:
    running = opened(tmp_path, shard=Shard(2, 2))
    for name in (".1-of-2.tmp", ".2-of-2.tmp", ".1-of-1.tmp"):
        (tmp_path / "vectors" / name).write_bytes(b"x")
    opened(tmp_path, shard=Shard(1, 2)).close()
    assert [path.name for path in (tmp_path / "vectors").iterdir()] == [".2-of-2.tmp"]
    running.close()


def failed(id: str, reason: str = "broken") -> Failure:
    return Failure(id=id, source=f"/corpus/{id}", page=2, reason=reason)


def errors_in(out: Path) -> dict[str, str]:
    return {row["id"]: row["reason"] for row in pq.read_table(out / "errors.parquet").to_pylist()}


def test_errors_are_those_of_the_last_try(tmp_path: Path) -> None:
    output = opened(tmp_path)
    for id in ("a", "b", "c"):
        output.fail(failed(id))
    output.close()
    assert pq.read_table(tmp_path / "errors.parquet").to_pylist()[0] == {
        "id": "a",
        "page": 2,
        "source": "/corpus/a",
        "reason": "broken",
    }
    output = opened(tmp_path)
    output.put([embedded("a", "1")])
    output.fail(failed("b", "still"))
    output.close()
    assert errors_in(tmp_path) == {"b": "still", "c": "broken"}
    fill(opened(tmp_path), [("b", "2"), ("c", "3")])
    assert not (tmp_path / "errors.parquet").exists()


def test_too_many_failures_end_a_run(tmp_path: Path) -> None:
    output = opened(tmp_path, max_errors=1)
    output.put([embedded("a", "1")])
    output.fail(failed("b"))
    with pytest.raises(TooManyFailures, match="2 items failed, the last one c: broken"):
        output.fail(failed("c"))
    assert len(rows_in(tmp_path)) == 1 and errors_in(tmp_path).keys() == {"b", "c"}
    output.close()
    # Each run counts its own.
    output = opened(tmp_path, max_errors=1)
    output.fail(failed("b"))
    output.close()


def test_a_disk_that_takes_no_more_is_said(tmp_path: Path) -> None:
    output = opened(tmp_path)
    output.put([embedded("a", "1")])
    (tmp_path / "vectors").rmdir()
    with pytest.raises(OutputFailed, match="vectors"):
        output.close()


def gives(id: str, place: str, page: int | None) -> bool:
    """A source of all files but those that begin with ``other``."""
    return place in (f"/corpus/{id}", "in:2", "in:3") and not id.startswith("other")


def run(out: Path, corpus: dict[str, str], format: str, *failed: Failure, **settings: Any) -> Output:
    output = Output(OutputSettings(out=out, format=format, **settings), kind_of(), None, gives)  # type: ignore[arg-type]
    output.put([embedded(id, text) for id, text in corpus.items() if not output.done(id, content_of(text))])
    for failure in failed:
        output.fail(failure)
    output.finish()
    output.close()
    return output


@pytest.mark.parametrize("format", ["parquet", "lance"])
def test_rows_of_what_is_gone_go(tmp_path: Path, format: str) -> None:
    corpus = {f"{number}.txt": f"text {number}" for number in range(6)} | {"other.txt": "from elsewhere"}
    run(tmp_path, corpus, format, part_rows=3)
    left = {id: corpus[id] for id in ("1.txt", "4.txt")}
    assert run(tmp_path, left, format, keep_gone=True).gone == 0
    assert texts_in(tmp_path, corpus) == sorted(corpus)
    assert run(tmp_path, left, format).gone == 4
    assert texts_in(tmp_path, corpus) == ["1.txt", "4.txt", "other.txt"]
    assert run(tmp_path, left, format).gone == 0


@pytest.mark.parametrize("format", ["parquet", "lance", "openai"])
def test_what_cannot_be_read_any_more_has_no_row_beside_its_error(tmp_path: Path, format: str) -> None:
    corpus = {"a": "1", "b": "2", "c": "3"}
    run(tmp_path, corpus, format, part_rows=2)
    failure = Failure(id="b", source="/corpus/b", reason="unreadable")
    assert run(tmp_path, {"a": "1", "c": "3"}, format, failure).gone == 1
    assert texts_in(tmp_path, corpus) == ["a", "c"]
    # Changed while it failed, and read at last.
    assert run(tmp_path, corpus, format).gone == 0 and texts_in(tmp_path, corpus) == ["a", "b", "c"]


@pytest.mark.parametrize("format", ["parquet", "lance", "openai"])
def test_a_duplicate_is_an_error_after_every_run_and_takes_nothing_away(tmp_path: Path, format: str) -> None:
    twice = [Failure(id="a", source=f"in:{line}", reason=DUPLICATE) for line in (2, 3)]
    for _ in range(2):
        run(tmp_path, {"a": "1"}, format, *twice)
        assert texts_in(tmp_path, {"a": "1"}) == ["a"]
        path = tmp_path / f"errors{'.jsonl' if format == 'openai' else '.parquet'}"
        read = read_failures if format == "openai" else read_parquet
        assert [(failure.id, failure.source) for failure in read(path)] == [("a", "in:2"), ("a", "in:3")]
    run(tmp_path, {"a": "1"}, format)
    assert not path.exists()


def test_failures_of_what_is_gone_go(tmp_path: Path) -> None:
    failures = [Failure(id=id, source=f"/corpus/{id}", reason="bad") for id in ("a", "b", "other")]
    run(tmp_path, {"c": "3"}, "parquet", *failures)
    run(tmp_path, {"c": "3"}, "parquet", failures[0])
    assert {failure.id for failure in read_parquet(tmp_path / "errors.parquet")} == {"a", "other"}
