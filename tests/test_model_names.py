"""Names of models as clients write them."""

from __future__ import annotations

import pytest

from tessera.model_names import find_name

NAMES = ("nvidia/llama-3.2-nv-embedqa-1b-v2", "other_model", "Other.model")


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("nvidia/llama-3.2-nv-embedqa-1b-v2", NAMES[0]),
        ("nvidia/llama-3_2-nv-embedqa-1b-v2", NAMES[0]),
        ("NVIDIA/Llama-3_2-NV-EmbedQA-1B-v2", NAMES[0]),
        ("Other.model", NAMES[2]),
        ("OTHER_MODEL", NAMES[1]),
        ("llama-3.2-nv-embedqa-1b-v2", None),
        ("nvidia/llama-3-2-nv-embedqa-1b-v2", None),
        ("nvidia/llama-3.2-nv-embedqa-1b-v20", None),
        ("", None),
    ],
)
def test_case_and_dots_make_no_difference(asked: str, found: str | None) -> None:
    assert find_name(asked, NAMES) == found
