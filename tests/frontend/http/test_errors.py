"""Error classes and the answers they become."""

from __future__ import annotations

import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import pytest

from tessera import errors
from tessera.errors import TesseraError
from tessera.frontend.http.errors import MEANINGS, error_object, kind_of, release, render, render_status

ROOT = Path(__file__).parents[3]


def classes(root: type[TesseraError] = TesseraError) -> list[type[TesseraError]]:
    return [root, *(found for child in root.__subclasses__() for found in classes(child))]


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.InvalidInput, 400),
        (errors.ModelNotFound, 404),
        (errors.UnsupportedRoute, 404),
        (errors.PayloadTooLarge, 413),
        (errors.UnsupportedMedia, 415),
        (errors.MediaFetchError, 422),
        (errors.Overloaded, 429),
        (errors.RequestCancelled, 499),
        (errors.EngineFailed, 500),
        (errors.ProtocolError, 500),
        (errors.Unavailable, 503),
        (errors.LeaseExpired, 503),
        (errors.DeadlineExceeded, 504),
    ],
)
def test_statuses(kind: type[TesseraError], status: int) -> None:
    failure = render(kind("why", param="input[3]"))
    assert failure.status == status
    body = orjson.loads(failure.body)
    assert body == {"error": error_object(kind("why", param="input[3]"))}
    assert body["error"]["code"] == kind.code
    assert body["error"]["param"] == "input[3]"
    assert body["error"]["message"] == "why"


def test_the_page_about_the_api_lists_the_same_statuses() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \| (.+) \|$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    listed = {int(status): meaning for statuses, meaning in rows for status in statuses.split(",")}
    assert listed.keys() == MEANINGS.keys()
    # Other words, and the same things: what a status is about must be named in both.
    for status, words in {
        422: "decoder",
        429: "Retry-After",
        431: "head",
        503: "worker",
        401: "API key",
    }.items():
        assert words in listed[status] and words in MEANINGS[status], status


def test_every_error_has_a_listed_status() -> None:
    for kind in classes():
        assert kind_of(kind("x")).status in MEANINGS


def test_retry_after_is_whole_seconds_of_at_least_one() -> None:
    def seconds(value: float | None) -> str | None:
        return render(errors.Overloaded("full", retry_after=value)).headers.get("retry-after")

    assert [seconds(value) for value in (0.01, 1.0, 1.2, 7.0, 1e9, float("inf"), float("nan"), -3.0)] == [
        *("1", "1", "2", "7", "3600", "3600", "3600", "1"),
    ]
    assert seconds(None) == "1"
    assert render(errors.Unavailable("gone")).headers["retry-after"] == "1"
    assert "retry-after" not in render(errors.InvalidInput("bad")).headers


def test_foreign_exceptions_tell_nothing() -> None:
    failure = render(RuntimeError("password=hunter2"))
    assert failure.status == 500
    assert b"hunter2" not in failure.body
    assert orjson.loads(failure.body)["error"]["type"] == "server_error"


def test_text_that_is_no_unicode_still_renders() -> None:
    assert orjson.loads(render(errors.InvalidInput("\ud800", param="\udfff")).body)["error"]["message"] == "?"


@pytest.mark.parametrize("status", MEANINGS)
def test_statuses_without_a_class(status: int) -> None:
    failure = render_status(status, "why", retry_after=3.0)
    error = orjson.loads(failure.body)["error"]
    assert failure.status == status
    assert error["message"] == "why"
    assert error["type"]
    assert error["code"]
    assert failure.headers["retry-after"] == "3"


class Body:
    """Stands for the megabytes of a request."""


def fail(body: Body) -> None:
    try:
        decode(body)
    except ValueError as cause:
        error = errors.InvalidInput("not an image", param="input")
        raise error from cause


def decode(body: Body) -> None:
    damaged = ValueError("damaged")
    raise damaged


@pytest.mark.usefixtures("without_collector")
def test_what_a_released_error_held_goes_at_once() -> None:
    held = Body()
    left = weakref.ref(held)
    with pytest.raises(errors.InvalidInput) as raised:
        fail(held)
    release(raised.value)
    del held, raised
    assert left() is None


@pytest.mark.usefixtures("without_collector")
def test_an_error_that_is_kept_holds_nothing_even_of_who_called() -> None:
    """Threads as well, which hold what they return."""

    def each(bodies: list[Body]) -> list[TesseraError]:
        return [kept(body) for body in bodies]

    def kept(body: Body) -> TesseraError:
        try:
            fail(body)
        except TesseraError as error:
            return error.kept()
        raise AssertionError

    held = Body()
    left = weakref.ref(held)
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(each, [held]).result()
    assert (found[0].message, found[0].param) == ("not an image", "input")
    del held
    assert left() is None
