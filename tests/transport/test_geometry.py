from __future__ import annotations

import pytest

from tessera.transport.slab.geometry import Geometry


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "int8"),
        ({"row_width": 0}, "positive"),
        ({"block_rows": -1}, "positive"),
        ({"capacity_rows": 0}, "positive"),
        ({"capacity_rows": 25}, "no multiple"),
    ],
)
def test_a_geometry_that_makes_no_sense(changes: dict[str, object], message: str) -> None:
    values = {"capacity_rows": 20, "block_rows": 10, "row_width": 4, "dtype": "float16"} | changes
    with pytest.raises(ValueError, match=message):
        Geometry(**values)  # type: ignore[arg-type]


def test_sizes() -> None:
    geometry = Geometry(capacity_rows=20, block_rows=10, row_width=4, dtype="bfloat16")
    assert (geometry.blocks, geometry.row_bytes, geometry.block_bytes, geometry.nbytes) == (2, 8, 80, 160)
