"""What ``docs/api.md`` says of options and routes."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from tessera.errors import InvalidInput
from tessera.frontend.api.openai import EMBEDDINGS, INERT, parse_embeddings

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
OPTIONS = PAGE.partition("## Options\n")[2].partition("\n## ")[0]
NAMES = [
    re.findall(r"`(\w+)`", line.split("|")[1]) for line in OPTIONS.splitlines() if line.startswith("| `")
]


def test_every_option_is_listed_once() -> None:
    listed = [name for names in NAMES for name in names]
    inert = re.findall(r"`(\w+)`", OPTIONS.partition("\nThese are accepted")[2])
    assert sorted(listed) == sorted(EMBEDDINGS.names - INERT.keys() - {"input", "messages"})
    assert sorted(inert) == sorted(INERT)


@pytest.mark.parametrize(
    ("first", "other", "values"),
    [
        ("embed_dtype", "embedding_type", ("int8", "uint8")),
        ("embed_dtype", "output_dtype", ("int8", "uint8")),
        ("dimensions", "output_dimension", (8, 16)),
        ("normalize", "normalized", (False, True)),
        ("normalize", "use_activation", (False, True)),
        ("truncate", "truncation", ("END", "NONE")),
        ("request_id", "rid", ("a", "b")),
    ],
)
def test_names_of_one_row_mean_the_same(first: str, other: str, values: tuple[object, object]) -> None:
    (names,) = [names for names in NAMES if first in names]
    assert names[0] == first and other in names
    by_first, by_other = (parse_embeddings({"input": "a", name: values[0]}) for name in (first, other))
    assert (
        by_first
        == msgspec.structs.replace(
            by_other, dimensions_param=by_first.dimensions_param, dtype_param=by_first.dtype_param
        )
        != parse_embeddings({"input": "a"})
    )
    with pytest.raises(InvalidInput, match="contradicts"):
        parse_embeddings({"input": "a", first: values[0], other: values[1]})
