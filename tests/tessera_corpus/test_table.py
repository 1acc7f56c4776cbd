"""Tables of Parquet and Lance as sources."""

from __future__ import annotations

import os
import re
import signal
import uuid
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from benchmarks.proc import below

from tessera.errors import ConfigError
from tessera.local.content import ImageFile
from tessera.sandbox import seccomp
from tessera_corpus.item import Document, Failure, Item, Row
from tessera_corpus.shard import Shard
from tessera_corpus.sources.choice import open_source
from tessera_corpus.sources.lines import Honoured
from tessera_corpus.sources.media import Media
from tessera_corpus.sources.parquet import MOST_ROWS, Unread
from tessera_corpus.sources.settings import Columns, FetchPolicy, SourceSettings
from tessera_corpus.sources.table import Table
from tests.imaging.test_kinds import several
from tests.tessera_corpus.output.made import write_lance

pytestmark = [pytest.mark.starts, pytest.mark.usefixtures("forks")]

HONOURED = Honoured(models=(), dimensions=256)


def read(path: Path, **settings: Any) -> list[Row]:
    return list(open_source([str(path)], SourceSettings(**settings), HONOURED).rows())


def read_each(paths: Sequence[Path]) -> list[list[Row]]:
    """The rows of each table, by one reader for all of them: a start takes 0.3 s of processor time."""
    found: dict[str, list[Row]] = {str(path): [] for path in paths}
    for row in open_source([*found], SourceSettings(), HONOURED).rows():
        found[row.source.rpartition(":")[0]].append(row)
    return [*found.values()]


@pytest.mark.parametrize("kind", ["parquet", "lance"])
def test_rows_of_a_table(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.png").write_bytes(b"a")
    (tmp_path / "b.pdf").write_bytes(b"%PDF")
    table = pa.table(
        {
            "id": ["text", "bytes", None, "none", "path"],
            "text": ["t", "beside", "third", " ", None],
            "image": pa.array([None, b"png", None, None, b"x"], pa.binary()),
            "page": pa.array([None, 3, None, None, 4], pa.int32()),
            "score": [1.0, 2.0, 3.0, 4.0, 5.0],
        }
    )
    path = tmp_path / f"in.{kind}"
    pq.write_table(table, path) if kind == "parquet" else write_lance(table, path)
    rows = read(path)
    assert rows[0] == Item(id="text", source=f"{path}:0", parts=("t",))
    assert rows[1] == Item(id="bytes", source=f"{path}:1", page=3, parts=(ImageFile(b"png"), "beside"))
    assert rows[2] == Item(id=f"{path}:2", source=f"{path}:2", parts=("third",))
    assert rows[3] == Failure(id="none", source=f"{path}:3", reason="neither text nor image")
    assert rows[4] == Item(id="path", source=f"{path}:4", page=4, parts=(ImageFile(b"x"),))
    source = open_source([str(path)], SourceSettings(), HONOURED)
    assert len(list(source.rows())) == 5
    assert (source.position().read, source.position().most) == (5, 5)


def test_images_by_name_and_as_datasets_has_them(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"a")
    (tmp_path / "b.pdf").write_bytes(b"%PDF")
    names = pa.table({"key": [1, 2, 3], "picture": ["a.png", "b.pdf", "../outside.png"]})
    pq.write_table(names, tmp_path / "names.parquet")
    columns = Columns(id="key", image="picture")
    first, second, third = read(tmp_path / "names.parquet", columns=columns, root=tmp_path)
    assert isinstance(first, Item) and first.id == "1" and first.parts == (ImageFile(b"a"),)
    assert isinstance(second, Document) and second.data == b"%PDF"
    assert isinstance(third, Failure) and "no readable file" in third.reason
    structs = pa.table({"image": [{"bytes": b"own", "path": "x.png"}, {"bytes": None, "path": "a.png"}]})
    pq.write_table(structs, tmp_path / "structs.parquet")
    one, other = read(tmp_path / "structs.parquet", root=tmp_path)
    assert isinstance(one, Item) and one.parts == (ImageFile(b"own"),)
    assert isinstance(other, Item) and other.parts == (ImageFile(b"a"),)


@pytest.mark.parametrize("root", [False, True])
def test_addresses_of_other_stores_are_refused_by_name(tmp_path: Path, root: bool) -> None:
    names = ["s3://bucket/a.png", "gs://bucket/a.png"]
    pq.write_table(pa.table({"image": names}), tmp_path / "in.parquet")
    rows = read(tmp_path / "in.parquet", root=tmp_path if root else None)
    reasons = [row.reason for row in rows if isinstance(row, Failure)]
    assert [reason.partition(" is not read")[0] for reason in reasons] == ["image: s3://", "image: gs://"]


def test_a_table_without_what_is_asked_for_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ConfigError, match="there are a; --text-column"):
        read(tmp_path / "other.parquet")
    pq.write_table(pa.table({"text": [1.5], "image": [2]}), tmp_path / "types.parquet")
    (row,) = read(tmp_path / "types.parquet")
    assert isinstance(row, Failure) and row.reason == "text: expected a text"


def damaged(path: Path, good: bytes, how: str) -> None:
    match how:
        case "words":
            path.write_bytes(b"PAR1 and nothing else")
        case "empty":
            path.touch()
        case "cut":
            path.write_bytes(good[: len(good) // 2])
        case "footer":
            path.write_bytes(good[:-200] + bytes(150) + good[-50:])
        case "pages":
            path.write_bytes(good[:4] + b"\xff" * 400 + good[404:])
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to("/dev/zero")
        case _:
            raise AssertionError(how)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "good.parquet"
    texts = [f"text {number} of the table" for number in range(200)]
    pq.write_table(pa.table({"text": texts}), path, compression="none", use_dictionary=False)
    return path.read_bytes()


def test_a_damaged_table_ends_itself_alone(tmp_path: Path, good: bytes) -> None:
    kinds = ("words", "empty", "cut", "footer", "pages", "fifo", "folder", "link")
    paths = []
    for number, how in enumerate(kinds):
        paths += [tmp_path / f"{number}-{how}.parquet", tmp_path / f"{number}.parquet"]
        damaged(paths[-2], good, how)
        paths[-1].write_bytes(good)
    source = open_source([str(path) for path in paths], SourceSettings(), HONOURED)
    rows = list(source.rows())
    failed = [row for row in rows if isinstance(row, Failure)]
    assert [row.id for row in failed] == [row.source for row in failed] == [str(path) for path in paths[::2]]
    assert all(row.reason and "\n" not in row.reason for row in failed), failed
    assert "is no regular file" in failed[5].reason
    texts = [row.parts for row in rows if isinstance(row, Item)]
    assert texts == [(f"text {number} of the table",) for _ in kinds for number in range(200)]
    assert source.position().read == source.position().most


def test_what_stands_before_the_damage_is_read(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    table = pa.table({"text": [f"text {number}" for number in range(1000)]})
    pq.write_table(table, path, compression="none", use_dictionary=False, row_group_size=100)
    second = pq.ParquetFile(path).metadata.row_group(5).column(0).data_page_offset
    with path.open("r+b") as file:
        file.seek(second)
        file.write(b"\xff" * 64)
    *items, failure = read(path)
    assert [row.parts for row in items if isinstance(row, Item)] == [
        (f"text {number}",) for number in range(500)
    ]
    assert isinstance(failure, Failure)
    assert failure.id == str(path) and failure.reason.endswith("; rows from 500 on are not read")


def test_damaged_tables_of_lance_too(tmp_path: Path) -> None:
    (tmp_path / "empty.lance").mkdir()
    write_lance(pa.table({"text": ["a"]}), tmp_path / "good.lance")
    paths = [tmp_path / "empty.lance", tmp_path / "good.lance"]
    failure, item = open_source([str(path) for path in paths], SourceSettings(), HONOURED).rows()
    assert isinstance(failure, Failure) and failure.id == str(paths[0])
    assert isinstance(item, Item) and item.parts == ("a",)


def test_a_lance_table_whose_reader_ends_is_a_failure_of_its_own(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.lance" for number in range(2)]
    for path in paths:
        write_lance(pa.table({"text": [f"text {number}" for number in range(MOST_ROWS * 3)]}), path)
    before = set(below(os.getpid()))
    rows = Table(path=paths[0], columns=Columns(), media=Media(None, FetchPolicy(), 1), shard=Shard()).rows()
    first = next(rows)
    assert isinstance(first, Item) and first.parts == ("text 0",)
    (reader,) = set(below(os.getpid())) - before
    limits = Path(f"/proc/{reader}/limits").read_text()
    assert re.search(r"Max file size +0 +0 ", limits) and "Max data size             8589934592" in limits
    os.kill(reader, signal.SIGKILL)
    *items, failure = rows
    assert all(isinstance(row, Item) for row in items)
    assert isinstance(failure, Failure) and failure.id == str(paths[0])
    assert re.match(r"its reader crashed.*; rows from \d+ on are not read", failure.reason)
    assert len(read(paths[1])) == MOST_ROWS * 3
    assert set(below(os.getpid())) <= before


def test_lines_that_went_away_end_themselves_alone(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.jsonl" for number in range(2)]
    for path in paths:
        path.write_text('{"text": "a"}')
    source = open_source([str(path) for path in paths], SourceSettings(), HONOURED)
    paths[0].unlink()
    failure, item = source.rows()
    assert failure == Failure(id=str(paths[0]), source=str(paths[0]), reason="No such file or directory")
    assert isinstance(item, Item) and item.id == f"{paths[1]}:1"


def test_a_table_is_read_by_a_process_that_may_open_nothing(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "table.parquet"
    path.write_bytes(good)
    media = Media(None, FetchPolicy(), 1 << 20)
    before = set(below(os.getpid()))
    try:
        opened = media.tables(Columns()).open(path)
        (confined,) = [pid for pid in below(os.getpid()) if pid not in before and not below(pid)]
        status = Path(f"/proc/{confined}/status").read_text()
        assert "NoNewPrivs:\t1" in status
        if seccomp.supported():
            assert "Seccomp:\t2" in status
        # It ends, and another one reads on.
        first = opened.rows(0, 10)
        os.kill(confined, signal.SIGKILL)
        # Its end is seen before the call, which goes to another one, or by the call.
        with suppress(Unread):
            opened.rows(10, 10)
        assert [values.text for values in (*first, *opened.rows(10, 10))] == [
            f"text {number} of the table" for number in range(20)
        ]
        opened.close()
    finally:
        media.close()
    assert set(below(os.getpid())) <= before


def test_a_row_that_is_too_large_is_a_failure_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    images = [b"a" * 10, b"b" * (70 << 20), b"c" * (40 << 20), b"d" * (40 << 20), b"e"]
    table = pa.table({"image": pa.array(images, pa.binary())})
    pq.write_table(
        table, path, row_group_size=3, compression="none", use_dictionary=False, write_statistics=False
    )
    rows = read(path, max_bytes=1 << 20)
    assert [row.parts if isinstance(row, Item) else row.reason for row in rows] == [
        (ImageFile(images[0]),),
        "a row of more than 65 MiB",
        (ImageFile(images[2]),),
        (ImageFile(images[3]),),
        (ImageFile(b"e"),),
    ]
    assert [row.source for row in rows] == [f"{path}:{number}" for number in range(5)]


def test_every_row_can_be_read_again(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "table.parquet"
    path.write_bytes(good)
    media = Media(None, FetchPolicy(), 1 << 20)
    table = Table(path=path, columns=Columns(), media=media, shard=Shard())
    try:
        rows = list(table.rows())
        for number in (0, 1, 63, 64, 199, 5):
            assert table.at(number) == [rows[number]]
        assert table.at(200) == []
        path.write_bytes(good[:100])
        with pytest.raises(ConfigError, match=r"table\.parquet: "):
            table.at(0)
    finally:
        media.close()


def of_bytes(values: list[bytes]) -> pa.Array:
    """A column of texts that may be none, as a program in another language can write it."""
    return pa.Array.from_buffers(pa.string(), len(values), pa.array(values, pa.binary()).buffers())


BAD = [
    ("text", of_bytes([b"a", b"R\xc9UNION", b"c"]), "text: not UTF-8 from byte 1 on"),
    ("text", pa.array([b"a", b"R\xc9UNION", b"c"]), "text: not UTF-8 from byte 1 on"),
    ("id", of_bytes([b"a", b"\xff", b"c"]), "id: not UTF-8 from byte 0 on"),
    ("id", pa.array([1, 1 << 55, 3], pa.timestamp("ms")), "id: out of range"),
    ("id", pa.array([1, 10**8, 3], pa.date32()), "id: out of range"),
    ("page", pa.array([1, 1 << 31, 3]), "page: 2147483648 is no number of a page"),
    ("page", pa.array([1, (1 << 64) - 1, 3], pa.uint64()), "page: 18446744073709551615 is no"),
    ("page", pa.array([1, -1, 3]), "page: -1 is no number of a page"),
    ("page", pa.array([1, 2.5, 3]), "page: expected a number, not '2.5'"),
    ("page", pa.array([1, float("inf"), 3]), "page: expected a number, not 'inf'"),
    ("page", pa.array(["1", "iv", "3"]), "page: expected a number, not 'iv'"),
    ("page", pa.array([0, 1 << 55, 3], pa.timestamp("ms")), "page: "),
    ("page", pa.array([[1], [2], [3]]), "page: expected a number"),
]


def test_a_bad_value_is_a_failure_of_its_row(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.parquet" for number in range(len(BAD))]
    for path, (column, bad, _) in zip(paths, BAD, strict=True):
        columns = {"id": ["x", "y", "z"], "text": ["t", "u", "v"]} | {column: bad}
        pq.write_table(pa.table(columns), path)
    for rows, (column, bad, said) in zip(read_each(paths), BAD, strict=True):
        failures = [row for row in rows if isinstance(row, Failure)]
        # A page of another type is one in every row.
        every = column == "page" and not isinstance(bad[0].as_py(), int | float | str)
        assert len(rows) == 3 and len(failures) == (3 if every else 1), said
        assert all(failure.reason.startswith(said) and failure.page is None for failure in failures), said
        assert rows[1] in failures, said


def test_pages_of_any_type_and_ids_of_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.parquet" for number in range(6)]
    for number, pages in enumerate(
        (
            pa.array([1.0, float("nan"), 3.0]),
            pa.array(["1", "", "3"]),
            pa.array(["1.0", "", " 3."]),
            pa.array([Decimal(1), None, Decimal(3)]),
            pa.array([1, None, 3], pa.uint64()),
        )
    ):
        ids = pa.array([b"\0\1", b"\xff\xfe", b"ab"], pa.binary(2) if number % 2 else pa.binary())
        pq.write_table(pa.table({"id": ids, "text": [b"t", b"u", b"v"], "page": pages}), paths[number])
    unique = uuid.UUID(int=5)
    pq.write_table(pa.table({"id": pa.array([unique.bytes], pa.uuid()), "text": ["t"]}), paths[-1])
    *found, (row,) = read_each(paths)
    for number, rows in enumerate(found):
        assert [(each.id, each.page) for each in rows if isinstance(each, Item)] == [
            ("0001", 1),
            ("fffe", None),
            ("6162", 3),
        ], number
    assert row.id == str(unique)


def test_moments_of_any_zone_are_ids(tmp_path: Path) -> None:
    zones = {
        None: "00:00:00",
        "UTC": "00:00:00+00:00",
        "Europe/Berlin": "00:00:00+00:00",
        "+05:30": "05:30:00+05:30",
        "Nowhere/Else": "00:00:00+00:00",
    }
    written = {}
    for number, (zone, said) in enumerate(zones.items()):
        ids = pa.array([1_577_836_800_000_000, None], pa.timestamp("us", tz=zone))
        written[tmp_path / f"{number}.parquet"] = f"2020-01-01 {said}"
        pq.write_table(pa.table({"id": ids, "text": ["x", "y"]}), tmp_path / f"{number}.parquet")
        # Each of Lance has a reader of its own, which makes ids of moments by the same function.
        if zone in (None, "+05:30"):
            written[tmp_path / f"{number}.lance"] = f"2020-01-01 {said}"
            write_lance(pa.table({"id": ids, "text": ["x", "y"]}), tmp_path / f"{number}.lance")
    for (path, said), (first, second) in zip(written.items(), read_each([*written]), strict=True):
        assert isinstance(first, Item) and isinstance(second, Item)
        assert (first.id, second.id) == (said, f"{path}:1")


def test_gaps_of_numbers_are_no_ids(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"id": [1.0, float("nan"), float("nan")], "text": ["t", "u", "v"]}), path)
    assert [row.id for row in read(path)] == ["1.0", f"{path}:1", f"{path}:2"]


@pytest.mark.parametrize("name", ["id", "text"])
def test_two_columns_of_a_name_are_refused(tmp_path: Path, name: str) -> None:
    """None of the two is the one that is meant."""
    texts = [pa.array([value]) for value in ("a", "b", "c")]
    pq.write_table(pa.table(texts, names=["id", "text", name]), tmp_path / "in.parquet")
    with pytest.raises(ConfigError, match=f"has 2 columns '{name}'"):
        read(tmp_path / "in.parquet")


def test_documents_and_scans_in_a_column(tmp_path: Path) -> None:
    images = pa.array([b"%PDF-1.7", several(10, 20)], pa.binary())
    pq.write_table(pa.table({"id": ["a", "b"], "image": images}), tmp_path / "in.parquet")
    document, first, second = read(tmp_path / "in.parquet")
    assert isinstance(document, Document) and document.id == "a"
    assert [(row.id, row.page) for row in (first, second) if isinstance(row, Item)] == [
        ("b#page=1", 1),
        ("b#page=2", 2),
    ]


def test_a_glob_that_no_shell_has_replaced(tmp_path: Path) -> None:
    for name in "ab":
        pq.write_table(pa.table({"id": [name], "text": ["t"]}), tmp_path / f"{name}.parquet")
    assert [row.id for row in read(tmp_path / "*.parquet")] == ["a", "b"]
    with pytest.raises(ConfigError, match="no such file"):
        read(tmp_path / "*.jsonl")
