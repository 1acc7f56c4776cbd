"""JSON lines, plain ones and those of an OpenAI batch, as somebody hostile could write them."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tessera.local.content import ImageFile
from tessera.models.base import Role, Truncate
from tessera_corpus.item import Document, Failure, Item, Row, request_of
from tessera_corpus.shard import Shard
from tessera_corpus.sources.choice import open_source
from tessera_corpus.sources.lines import Honoured, Lines
from tessera_corpus.sources.media import Media
from tessera_corpus.sources.settings import FetchPolicy, SourceSettings
from tests.imaging.test_kinds import several

HONOURED = Honoured(models=("org/model",), dimensions=256, truncate=Truncate.END)


def read(path: Path, root: Path | None = None, **settings: Any) -> list[Row]:
    return list(open_source([str(path)], SourceSettings(root=root, **settings), HONOURED).rows())


def written(folder: Path, *lines: object) -> Path:
    path = folder / "in.jsonl"
    path.write_bytes(
        b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
    )
    return path


def reasons(rows: list[Row]) -> dict[str, str]:
    return {row.id: row.reason for row in rows if isinstance(row, Failure)}


def test_plain_lines(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"png")
    (tmp_path / "b.pdf").write_bytes(b"%PDF")
    url = "data:image/png;base64," + base64.b64encode(b"data").decode()
    path = written(
        tmp_path,
        {"id": "text", "text": "a text", "other": [1]},
        {"id": 7, "image": "a.png"},
        b"\n",
        {"image": url, "text": "beside"},
        {"id": "doc", "image": "b.pdf"},
    )
    text, number, both, document = read(path, tmp_path)
    assert text == Item(id="text", source=f"{path}:1", parts=("a text",))
    assert number == Item(id="7", source=f"{path}:2", parts=(ImageFile(b"png"),))
    assert both == Item(id=f"{path}:4", source=f"{path}:4", parts=(ImageFile(b"data"), "beside"))
    assert document == Document(id="doc", source=f"{path}:5", data=b"%PDF")


def test_lines_that_cannot_be_read_are_failures_and_the_next_one_is_read(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        b"{\n",
        b'"text"\n',
        b'{"id": "caf\xe9", "text": "t"}\n',
        {"id": "none"},
        {"id": "blank", "text": " \n"},
        {"id": "list", "text": ["t"]},
        {"id": "number", "image": 3},
        {"id": True, "text": "t"},
        b'{"id": "long", "text": "' + b"x" * 3000 + b'"}\n',
        {"id": "good", "text": "t"},
        b'{"id": "last", "text": "without a line end"}',
    )
    rows = read(path, max_line_bytes=2000)
    found = reasons(rows)
    assert [row.id for row in rows if isinstance(row, Item)] == ["good", "last"]
    assert [row.source for row in rows] == [f"{path}:{number}" for number in range(1, 12)]
    assert found["none"] == found["blank"] == "neither text nor image"
    assert (
        found["list"] == "text: expected a text"
        and found["number"] == "image: expected a text, or a list of texts"
    )
    assert found[f"{path}:9"] == "more than 2000 bytes"
    assert "not JSON" in found[f"{path}:1"] and "not JSON" in found[f"{path}:3"]


def test_files_are_read_below_the_root_alone(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret.png").write_bytes(b"secret")
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "own.png").write_bytes(b"own")
    names = ["../secret.png", "link.png", str(tmp_path / "secret.png"), "missing.png", ".", "own.png"]
    names += [f"file://{root}/own.png", f"file://{tmp_path}/secret.png"]
    path = written(tmp_path, *({"id": str(place), "image": name} for place, name in enumerate(names)))
    rows = read(path, root)
    assert {row.id for row in rows if isinstance(row, Item)} == {"5", "6"}
    assert b"secret" not in b"".join(
        part.data
        for row in rows
        if isinstance(row, Item)
        for part in row.parts
        if isinstance(part, ImageFile)
    )
    # Not which of them are there.
    assert len(set(reasons(rows).values())) == 1
    assert all("--root" in reason for reason in reasons(read(path)).values())


def test_batch_lines_mean_what_they_mean_over_http(tmp_path: Path) -> None:
    url = "data:image/png;base64," + base64.b64encode(b"data").decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "t"}]

    def line(id: str, **body: object) -> dict[str, object]:
        return {"custom_id": id, "method": "POST", "url": "/v1/embeddings", "body": body}

    path = written(
        tmp_path,
        line("one", input="t", model="ORG/model", dimensions=256, truncate="END"),
        line("query", input="t", input_type="query"),
        line("several", input=["a", "b"], input_type="passage"),
        line("chat", messages=[{"role": "user", "content": parts}]),
    )
    one, query, first, second, chat = read(path)
    assert isinstance(one, Item) and one.id == "one" and one.parts == ("t",) and one.role is Role.NONE
    assert isinstance(query, Item) and query.role is Role.QUERY
    assert isinstance(first, Item) and (first.id, first.parts, first.role) == (
        "several#0",
        ("a",),
        Role.PASSAGE,
    )
    assert second.id == "several#1"
    assert isinstance(chat, Item) and chat.parts == (ImageFile(b"data"), "t") and chat.role is Role.PASSAGE


def test_no_two_inputs_of_a_batch_have_one_id(tmp_path: Path) -> None:
    asked = {"doc": 4, "doc#3": 1, "doc#3#0": 1, "doc#x": 1, "doc#01": 1, "other#2": 2}
    lines = [
        {"custom_id": id, "body": {"input": [f"{number}" for number in range(count)]}}
        for id, count in asked.items()
    ]
    rows = read(written(tmp_path, *lines))
    ids = ["doc#0", "doc#1", "doc#2", "doc#3", "doc#3#0", "doc#3#0#0", "doc#x", "doc#01"]
    assert [row.id for row in rows] == [*ids, "other#2#0", "other#2#1"]
    requests = [request_of(row.id, row.place) for row in rows if isinstance(row, Item)]
    assert requests == [id for id, count in asked.items() for _ in range(count)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"body": {"input": "t", "model": "other"}}, "model: 'other'"),
        ({"body": {"input": "t", "dimensions": 64}}, "dimensions: the run makes 256"),
        ({"body": {"input": "t", "truncate": "START"}}, "truncate: the run has END"),
        ({"body": {"input": "t", "normalize": False}}, "normalize"),
        ({"body": {"input": [1, 2]}}, "no token ids"),
        ({"body": {"input": ["t", "u"], "late_chunking": True}}, "late_chunking"),
        ({"body": {"input": "t", "nonsense": 1}}, "nonsense"),
        ({"body": {}}, "input"),
        ({"body": "text"}, "object"),
        ({"url": "/v1/chat/completions", "body": {"input": "t"}}, "POST /v1/embeddings"),
        ({"method": "GET", "body": {"input": "t"}}, "POST /v1/embeddings"),
        ({"body": {"input": [{"image": "/etc/passwd"}]}}, "--root"),
    ],
)
def test_what_a_run_cannot_honour_is_a_failure(tmp_path: Path, line: dict[str, object], said: str) -> None:
    (row,) = read(written(tmp_path, {"custom_id": "a", **line}))
    assert isinstance(row, Failure) and row.id == "a" and said in row.reason


def test_shards_divide_the_lines(tmp_path: Path) -> None:
    lines = [{"id": str(number), "text": "t"} for number in range(40)]
    path = written(tmp_path, *lines, {"custom_id": "several", "body": {"input": ["a", "b"]}})
    parts = [[row.id for row in read(path, shard_text=f"{number}/3")] for number in (1, 2, 3)]
    assert all(parts) and sorted(id for part in parts for id in part) == sorted(row.id for row in read(path))
    (whole,) = (part for part in parts if "several#0" in part)
    assert "several#1" in whole and Shard.parse("1/3")


class _Pictures(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path.endswith(".png") else 404)
        self.end_headers()
        self.wfile.write(self.path.encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Pictures) as found:
        threading.Thread(target=found.serve_forever).start()
        yield f"http://127.0.0.1:{found.server_port}"
        found.shutdown()


def test_urls_are_fetched_under_the_policy_and_come_in_order(tmp_path: Path, server: str) -> None:
    lines = [{"id": str(number), "image": f"{server}/{number}.png"} for number in range(90)]
    path = written(tmp_path, *lines, {"id": "gone", "image": f"{server}/gone"})
    assert all("private" in reason or "not" in reason for reason in reasons(read(path)).values())
    assert len(reasons(read(path))) == 91
    rows = read(path, media=FetchPolicy(allow_private=True))
    assert [row.id for row in rows] == [*map(str, range(90)), "gone"]
    assert all(
        isinstance(row, Item) and row.parts == (ImageFile(f"/{row.id}.png".encode()),) for row in rows[:-1]
    )
    assert "status 404" in reasons(rows)["gone"]


def test_a_byte_order_mark_is_no_part_of_a_line(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    path = written(tmp_path, mark + b'{"id":"a","text":"x"}\n', {"id": "b", "text": "y"}, mark + b"\n")
    assert [row.id for row in read(path)] == ["a", "b"]
    (first,) = Lines(
        name="in",
        path=path,
        media=Media(None, FetchPolicy(), 10),
        honoured=None,
        max_bytes=100,
        shard=Shard(),
    ).at(1)
    assert isinstance(first, Item) and first.id == "a"


def test_what_a_file_holds_decides_what_its_rows_are(tmp_path: Path) -> None:
    (tmp_path / "fax.tif").write_bytes(several(10, 20))
    (tmp_path / "page.png").write_bytes(b"%PDF-1.7")
    lines = [{"id": "fax", "image": "fax.tif"}, {"id": "beside", "image": "fax.tif", "text": "t"}]
    rows = read(written(tmp_path, *lines, {"id": "page", "image": "page.png"}), tmp_path)
    assert [row.id for row in rows] == ["fax#page=1", "fax#page=2", "beside", "page"]
    assert reasons(rows) == {"beside": "a TIFF file of 2 pages, and there is one text beside it"}
    assert isinstance(rows[3], Document)


def test_lines_know_what_they_would_give(tmp_path: Path) -> None:
    path = written(tmp_path)
    source = open_source([str(path)], SourceSettings(), HONOURED)
    assert source.gives("any", f"{path}:7", None) and source.gives("a#3", f"{path}:7", None)
    assert not source.gives("any", str(path), None) and not source.gives("any", "other.jsonl:7", None)
    assert not open_source(["-"], SourceSettings(), HONOURED).gives("a", "standard input:7", None)
    parts = [open_source([str(path)], SourceSettings(shard_text=f"{k}/3"), HONOURED) for k in (1, 2, 3)]
    assert [part.gives("any", f"{path}:7", None) for part in parts].count(True) == 1
    assert not any(part.gives("request#3", f"{path}:7", None) for part in parts)


def test_images_of_a_list_are_one_input(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"a")
    (tmp_path / "b.pdf").write_bytes(b"%PDF-1.7")
    path = tmp_path / "lists.jsonl"
    lines: list[dict[str, object]] = [
        {"id": "two", "image": ["a.png", "data:image/png;base64,Yg=="], "text": "t"},
        {"id": "one", "image": ["a.png"]},
        {"id": "none", "image": [], "text": "t"},
        {"id": "hole", "image": ["a.png", None]},
        {"id": "mixed", "image": ["a.png", "b.pdf"]},
        {"id": "gone", "image": ["a.png", "c.png"]},
        {"id": "document", "image": ["b.pdf"]},
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = {row.id: row for row in read(path, root=tmp_path)}
    two, one, none = found["two"], found["one"], found["none"]
    assert isinstance(two, Item) and two.parts == (ImageFile(b"a"), ImageFile(b"b"), "t")
    assert isinstance(one, Item) and one.parts == (ImageFile(b"a"),)
    assert isinstance(none, Item) and none.parts == ("t",)
    failed = reasons(list(found.values()))
    assert failed["hole"] == "image: expected a text, or a list of texts"
    assert failed["mixed"] == "a file of several pages among several images"
    assert "no readable file" in failed["gone"]
    assert isinstance(found["document"], Document)
