"""What ``/openapi.json`` and ``/docs`` say of every field of every route."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.frontend.alone import frontend

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def client(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with frontend(checkpoint, tmp_path_factory.mktemp("descriptions")) as running:
        yield running


def bodies(client: httpx.Client) -> dict[str, dict[str, Any]]:
    """The schema of each form of the body of each route that takes one, by its path and name."""
    paths = client.get("/openapi.json").json()["paths"]
    return {
        f"{path} {form.get('title')}": form
        for path, methods in paths.items()
        for operation in methods.values()
        for media in operation.get("requestBody", {}).get("content", {}).values()
        for form in ([media["schema"]] if "properties" in media["schema"] else media["schema"]["anyOf"])
    }


def test_no_field_is_without_a_description_and_an_example(client: httpx.Client) -> None:
    found = bodies(client)
    assert len(found) > 15 and sum(len(schema["properties"]) for schema in found.values()) > 250
    for path, schema in found.items():
        assert schema["properties"], path
        for name, field in schema["properties"].items():
            assert field.get("description", "").endswith("."), (path, name, "description")
            assert field.get("examples"), (path, name, "examples")


@functools.cache
def validator_of(schema: str) -> jsonschema.protocols.Validator:
    """Checks the schema itself once, and not with each value: 1 s of processor time, not 6."""
    loaded = json.loads(schema)
    kind = jsonschema.validators.validator_for(loaded)
    kind.check_schema(loaded)
    return kind(loaded)


def test_examples_and_defaults_are_what_the_schema_takes(client: httpx.Client) -> None:
    defaults = 0
    for path, schema in bodies(client).items():
        for name, field in schema["properties"].items():
            validator = validator_of(json.dumps(field))
            for value in field["examples"]:
                validator.validate(value)
            if "default" in field:
                defaults += 1
                validator.validate(field["default"])
            assert field["examples"] != [None] or "no effect" in field["description"], (path, name)
    assert defaults > 50


def test_the_page_shows_them(client: httpx.Client) -> None:
    page = client.get("/docs").text
    route = page.partition("<code>POST /v1/embeddings</code>")[2].partition("<h2>")[0]
    rows = {
        cells[0]: cells
        for cells in (
            [unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", row, re.DOTALL)]
            for row in re.findall(r"<tr>(.*?)</tr>", route, re.DOTALL)
        )
        if cells
    }
    assert (
        rows["dimensions"][1:4] == ["integer", "", "256"] and "that the model offers" in rows["dimensions"][4]
    )
    assert "<code>GET /v1/models</code>" in rows["model"][4]
    assert "<th></th>" not in page
    assert rows["normalize"][2:4] == ["true", "false"]
    assert rows["encoding_format"][2] == json.dumps("float")
    # In a line, and not every form of a part.
    assert rows["input"][1] == "string | list of integer | list of object | object | list"
    assert rows["input"][3].splitlines()[0] == json.dumps("a yellow heart")
