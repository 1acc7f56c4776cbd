"""What every format has in common, and what Lance tables and lines have of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from msgspec import structs

from tessera.errors import ConfigError
from tessera.frontend.api.formats import convert
from tessera.frontend.request import EmbedDtype
from tessera_corpus.item import Failure
from tessera_corpus.shard import Shard
from tests.tessera_corpus.output.made import (
    THREE,
    WIDTH,
    content_of,
    embedded,
    fill,
    kind_of,
    opened,
    place_of,
    rows_in,
    texts_in,
    three,
    write_lance,
)

CORPUS = {f"it's {number}": f"text {number}" for number in range(25)}
CORPUS |= {f"list#{number}": f"input {number}" for number in range(7)}

formats = pytest.mark.parametrize("format", ["parquet", "lance", "openai"])


@formats
def test_it_goes_on(tmp_path: Path, format: str) -> None:
    first = dict(list(CORPUS.items())[3:-3])
    output = opened(tmp_path, format=format, part_rows=10)
    assert fill(output, first.items()) == list(first)
    assert texts_in(tmp_path, first) == sorted(first)
    assert len(fill(opened(tmp_path, format=format, part_rows=1), CORPUS.items())) == 6
    assert texts_in(tmp_path, CORPUS) == sorted(CORPUS)
    assert fill(opened(tmp_path, format=format), CORPUS.items()) == []


@formats
def test_a_changed_item_is_done_again(tmp_path: Path, format: str) -> None:
    fill(opened(tmp_path, format=format, part_rows=10), CORPUS.items())
    again = ["it's 1", "it's 20", "list#0", "list#2", "list#6"]
    changed = CORPUS | dict.fromkeys(again, "changed")
    assert fill(opened(tmp_path, format=format, part_rows=1), changed.items()) == again
    assert texts_in(tmp_path, changed) == sorted(CORPUS)
    all_changed = {id: f"all of {text}" for id, text in CORPUS.items()}
    assert fill(opened(tmp_path, format=format, part_rows=4), all_changed.items()) == list(CORPUS)
    assert texts_in(tmp_path, all_changed) == sorted(CORPUS)


@pytest.mark.parametrize("format", ["parquet", "lance"])
def test_an_output_from_before_there_were_warnings_goes_on(tmp_path: Path, format: str) -> None:
    first = dict(list(CORPUS.items())[:12])
    fill(opened(tmp_path, format=format, part_rows=5), first.items())
    if format == "lance":
        import lance

        lance.dataset(str(tmp_path / "vectors.lance")).drop_columns(["warning"])
    else:
        for path in (tmp_path / "vectors").glob("*.parquet"):
            pq.write_table(pq.ParquetFile(path).read().drop_columns(["warning"]), path)
    assert not any("warning" in row for row in rows_in(tmp_path))
    changed = CORPUS | {"it's 1": "changed"}
    assert len(fill(opened(tmp_path, format=format, part_rows=5), changed.items())) == len(CORPUS) - 11
    assert texts_in(tmp_path, changed) == sorted(CORPUS)
    assert all(row.get("warning") is None for row in rows_in(tmp_path))
    assert fill(opened(tmp_path, format=format), changed.items()) == []


@formats
def test_shards_write_side_by_side(tmp_path: Path, format: str) -> None:
    outputs = [opened(tmp_path, format=format, shard=Shard(number, 2), part_rows=3) for number in (1, 2)]
    for place, (id, text) in enumerate(CORPUS.items()):
        outputs[id.startswith("list") or place % 2].put([embedded(id, text)])
    for output in outputs:
        output.close()
    assert texts_in(tmp_path, CORPUS) == sorted(CORPUS)
    assert fill(opened(tmp_path, format=format), CORPUS.items()) == []


@formats
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_token_vectors(tmp_path: Path, format: str, dtype: str) -> None:
    output = opened(tmp_path, format=format, kind=kind_of(tokens=True, dtype=dtype))
    items = [embedded("a", "1", rows=3), embedded("b", "2")]
    output.put(items)
    output.close()
    for item, row in zip(items, rows_in(tmp_path), strict=True):
        values = np.array(row["vector"], dtype)
        assert values.shape == (len(item.rows.values), WIDTH)
        assert np.array_equal(values, convert(item.rows.values, EmbedDtype(dtype)))


@formats
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_a_column_for_each_output(tmp_path: Path, format: str, dtype: str) -> None:
    kind = kind_of(others=THREE, dtype=dtype)
    items = [three("a", "b"), three("list#1", "some text"), three("c's", "")]
    for some in (items[:1], items[1:]):
        output = opened(tmp_path, format=format, kind=kind)
        output.put(some)
        output.close()
    # What an output holds is rewritten with all of its columns.
    items[0] = three("a", "changed")
    output = opened(tmp_path, format=format, kind=kind)
    assert not output.done("a", content_of("changed")) and output.done("c's", content_of(""))
    output.put(items[:1])
    output.close()
    found = {row["id"]: row for row in rows_in(tmp_path)}
    assert sorted(found) == ["a", "c's", "list#1"]
    for item in items:
        dense, weights, vectors = item.rows.each()
        row = found[item.id]
        element = EmbedDtype(dtype)
        assert np.array_equal(np.array(row["vector"], dtype), convert(dense.values, element)[0])
        assert np.array_equal(np.array(row["multivector"], dtype), convert(vectors.values, element))
        assert weights.indices is not None
        assert row["sparse"] == {
            "indices": weights.indices.tolist(),
            "values": weights.values[:, 0].tolist(),
        }


@formats
def test_a_run_with_other_outputs_is_not_mixed_with_what_is_there(tmp_path: Path, format: str) -> None:
    fill(opened(tmp_path, format=format), CORPUS.items())
    with pytest.raises(ConfigError, match="columns vector, sparse, multivector, not vector"):
        opened(tmp_path, format=format, kind=kind_of(others=THREE))
    with pytest.raises(ConfigError, match="columns sparse, not vector"):
        opened(tmp_path, format=format, kind=kind_of(others=THREE[:1], width=0))
    with pytest.raises(ValueError, match="3 outputs for 1 columns"):
        opened(tmp_path, format=format).put([three("a", "b")])


@formats
def test_errors_go_when_the_item_has_its_vector(tmp_path: Path, format: str) -> None:
    output = opened(tmp_path, format=format)
    for id in ("it's 1", "list#2", "other"):
        output.fail(Failure(id=id, source="/corpus", page=3, place=place_of(id), reason="broken"))
    output.close()
    fill(opened(tmp_path, format=format), CORPUS.items())
    output = opened(tmp_path, format=format)
    assert list(output._errors._failures.values()) == [
        Failure(id="other", source="/corpus", page=3, reason="broken")
    ]
    output.close()


def test_another_format_is_refused(tmp_path: Path) -> None:
    fill(opened(tmp_path), CORPUS.items())
    with pytest.raises(ConfigError, match="format lance, not parquet"):
        opened(tmp_path, format="lance")
    fill(opened(tmp_path, format="lance", replace=True), CORPUS.items())
    assert texts_in(tmp_path, CORPUS) == texts_in(tmp_path / "replaced-1", CORPUS)


def test_a_lance_table_is_rid_of_what_was_not_committed(tmp_path: Path) -> None:
    fill(opened(tmp_path, format="lance"), CORPUS.items())
    data = tmp_path / "vectors.lance" / "data"
    held = set(data.iterdir())
    (data / "left.lance").write_bytes(b"x")
    opened(tmp_path, format="lance").close()
    assert set(data.iterdir()) == held


def test_a_lance_table_that_is_there_is_left_alone(tmp_path: Path) -> None:
    write_lance([{"id": "mine"}], tmp_path / "vectors.lance")
    with pytest.raises(ConfigError, match=r"holds files that no tessera\.json describes"):
        opened(tmp_path, format="lance")


def lines_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_those_of_a_batch(tmp_path: Path) -> None:
    output = opened(tmp_path, format="openai")
    output.put([embedded("one", "1"), embedded("list#1", "b"), embedded("list#0", "a")])
    output.fail(Failure(id="list#2", source="s", place=2, reason="broken"))
    output.close()
    (part,) = tmp_path.glob("vectors/*.jsonl")
    one, several = lines_in(part)
    assert (one["custom_id"], one["error"], one["response"]["status_code"]) == ("one", None, 200)
    assert one["id"].startswith("batch_req_")
    (vector,) = one["response"]["body"]["data"]
    assert (vector["object"], vector["index"]) == ("embedding", 0)
    assert vector["embedding"] == embedded("one", "1").rows.values[0].tolist()
    body = several["response"]["body"]
    assert [vector["index"] for vector in body["data"]] == [0, 1]
    assert (body["object"], body["model"], body["usage"]) == (
        "list",
        "m",
        {"prompt_tokens": 6, "total_tokens": 6},
    )
    (failed,) = lines_in(tmp_path / "errors.jsonl")
    assert (failed["custom_id"], failed["response"]) == ("list", None)
    assert failed["error"]["message"] == "broken" and failed["error"]["param"] == "input[2]"


def test_names_that_look_like_those_of_inputs_are_kept_apart_from_them(tmp_path: Path) -> None:
    corpus = {"one": "a", "list": "b", "list#0": "c", "list#1": "d", "it#1": "e", "it#1#0": "f"}
    output = opened(tmp_path, format="openai")
    output.put([embedded(id, text) for id, text in corpus.items()])
    output.close()
    (part,) = tmp_path.glob("vectors/*.jsonl")
    lines = lines_in(part)
    assert [(line["custom_id"], line["input_is_list"]) for line in lines] == [
        ("one", False),
        ("list", False),
        ("list", True),
        ("it#1", False),
        ("it#1#0", False),
    ]
    assert fill(opened(tmp_path, format="openai"), corpus.items()) == []
    changed = corpus | dict.fromkeys(["list", "list#1", "it#1"], "changed")
    assert fill(opened(tmp_path, format="openai"), changed.items()) == ["list", "list#1", "it#1"]
    assert texts_in(tmp_path, changed) == sorted(corpus)


def test_an_item_that_was_written_as_an_input_is_written_anew_when_it_changes(tmp_path: Path) -> None:
    # As an earlier version did it.
    output = opened(tmp_path, format="openai")
    output.put([structs.replace(embedded("it#1", "a"), place=1), embedded("one", "b")])
    output.close()
    assert fill(opened(tmp_path, format="openai"), [("it#1", "a")]) == []
    assert fill(opened(tmp_path, format="openai"), [("it#1", "changed")]) == ["it#1"]
    lines = [line for part in tmp_path.glob("vectors/*.jsonl") for line in lines_in(part)]
    assert sorted(line["custom_id"] for line in lines) == ["it#1", "one"]


def test_what_failed_as_a_request_is_forgotten_when_an_input_has_its_vector(tmp_path: Path) -> None:
    output = opened(tmp_path, format="openai")
    output.fail(Failure(id="list", source="s", reason="broken"))
    output.close()
    assert lines_in(tmp_path / "errors.jsonl")[0]["error"]["param"] is None
    fill(opened(tmp_path, format="openai"), [("list#0", "a")])
    assert not (tmp_path / "errors.jsonl").exists()


def test_an_openai_client_reads_a_line(tmp_path: Path) -> None:
    from openai.types import CreateEmbeddingResponse

    fill(opened(tmp_path, format="openai"), CORPUS.items())
    (part,) = tmp_path.glob("vectors/*.jsonl")
    for line in lines_in(part):
        answer = CreateEmbeddingResponse.model_validate(line["response"]["body"])
        assert answer.model == "m" and len(answer.data[0].embedding) == WIDTH
