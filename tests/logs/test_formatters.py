"""One record is one line, whatever stands in it."""

from __future__ import annotations

import json
import logging
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.logs import JsonFormatter, RequestLine, TextFormatter, count, note, serving

LOG = logging.getLogger("tessera.example")
FORGED = "ok\n2026-01-01 00:00:00,000 frontend[1] ERROR tessera: forged\r\x1b[2K\u2028{"


def record(message: str, *values: object, **extra: object) -> logging.LogRecord:
    return LOG.makeRecord(LOG.name, logging.WARNING, __file__, 1, message, values, None, extra=extra)


def test_a_json_line_has_dynamos_names_and_the_fields() -> None:
    line = json.loads(
        JsonFormatter("embed").format(record("it %s", "works", fields={"tokens": 3, "no": None}))
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line.pop("time"))
    assert line.pop("pid") > 0
    assert line == {
        "level": "WARN",
        "target": "tessera.example",
        "role": "embed",
        "message": "it works",
        "tokens": 3,
    }


@given(st.text(), st.text())
def test_any_text_gives_one_json_object(message: str, value: str) -> None:
    text = JsonFormatter("embed").format(record("%s", message, fields={"value": value}))
    assert len(text.splitlines()) == 1
    assert isinstance(json.loads(text), dict)


@given(st.text(st.characters(exclude_categories=[])))
def test_text_that_is_no_unicode_can_be_written(message: str) -> None:
    json.loads(JsonFormatter("embed").format(record("%s", message, fields={"value": message})))
    TextFormatter("embed").format(record("%s", message, fields={"value": message})).encode("utf-8", "replace")


@given(st.text())
def test_no_text_can_forge_a_line(message: str) -> None:
    lines = TextFormatter("embed").format(record("%s", message, fields={"value": message})).split("\n")
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} embed\[\d+\] WARNING tessera\.example: ", lines[0])
    for line in lines[1:]:
        assert line.startswith("  ")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]", "".join(lines))


def test_a_forged_line_is_visibly_part_of_another() -> None:
    text = TextFormatter("frontend").format(record("%s", FORGED, fields={"path": FORGED}))
    assert [line for line in text.splitlines() if line.startswith("2026-01-01")] == []
    assert "\x1b" not in text


def test_text_fields_follow_the_message() -> None:
    fields = {"request_id": "abc", "duration_ms": 1234567.8, "key": "the shop", "none": None}
    text = TextFormatter("frontend").format(record("done", fields=fields))
    assert text.endswith(': done request_id=abc duration_ms=1234567.8 key="the shop"')


@pytest.mark.parametrize("formatter", [JsonFormatter("embed"), TextFormatter("embed")])
def test_what_is_logged_during_a_request_carries_its_id(formatter: logging.Formatter) -> None:
    assert "abc" not in formatter.format(record("something"))
    with serving(RequestLine("abc")):
        assert "abc" in formatter.format(record("something"))
        assert "abc" not in formatter.format(record("something", fields={"request_id": "other"}))
    assert "abc" not in formatter.format(record("something"))


def test_notes_are_of_the_request_that_is_served() -> None:
    note(lost=1)
    count("lost")
    line = RequestLine("abc")
    with serving(line):
        note(tokens=3)
        count("retries")
        count("retries", 2)
    assert line.fields == {"tokens": 3, "retries": 3}


def test_an_exception_stays_in_the_line() -> None:
    try:
        raise ValueError("no data:image/png;base64,AAAA please")
    except ValueError:
        found = record("failed")
        found.exc_info = sys.exc_info()
    line = json.loads(JsonFormatter("embed").format(found))
    assert "ValueError" in line["exception"] and "AAAA" not in line["exception"]
    text = TextFormatter("embed").format(found).split("\n")
    assert text[0].endswith("failed")
    assert all(more.startswith("  ") for more in text[1:])
