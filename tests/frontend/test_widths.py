"""Widths as they are written, joined and offered."""

from __future__ import annotations

import pytest

from tessera.errors import ConfigError
from tessera.frontend.settings import parse
from tessera.frontend.widths import Widths


@pytest.mark.parametrize(
    ("text", "ranges"),
    [
        ("256,512,1024", ((256, 256), (512, 512), (1024, 1024))),
        ("64-2048", ((64, 2048),)),
        (" 8 , 1-4 5 2-3,", ((1, 5), (8, 8))),
        ("", ()),
    ],
)
def test_numbers_and_ranges_are_read_in_any_order(text: str, ranges: tuple[tuple[int, int], ...]) -> None:
    assert Widths.parse(text).ranges == ranges


@pytest.mark.parametrize("text", ["0", "-5", "64-", "9-8", "1.5", "all", "64-128-256", "1" * 30])
def test_what_is_no_width_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--dimensions-allowed: {text} is neither a width"):
        parse(["--model-path", "m", f"--dimensions-allowed=512,{text}"])


def test_what_the_checkpoint_lists_stays_offered() -> None:
    offered = Widths.offered(frozenset({32, 64}), 128, "60-63, 100")
    assert str(offered) == "32, 60 to 64, 100, 128"
    assert [width for width in range(1, 200) if width in offered] == [32, 60, 61, 62, 63, 64, 100, 128]
    assert str(Widths.offered(frozenset(), 128, "")) == "128"
    with pytest.raises(ConfigError, match="--dimensions-allowed 64-256: 64-256 goes beyond the model's own"):
        Widths.offered(frozenset(), 128, "64-256")
