"""The typefaces on the pages: those that matplotlib brings along, freely licensed and the same everywhere."""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path

from PIL import ImageFont

FACES = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "DejaVuSerif-Italic",
    "STIXGeneral",
    "STIXGeneralBol",
    "STIXGeneralItalic",
    "cmr10",
    "cmb10",
    "cmss10",
    "cmtt10",
)


@lru_cache(maxsize=1024)
def font(face: str, size: int) -> ImageFont.FreeTypeFont:
    """``face`` of ``FACES`` with an em of ``size`` pixels."""
    # The basic layout gives the same pixels whether or not a shaping library is installed.
    return ImageFont.truetype(str(_folder() / f"{face}.ttf"), size, layout_engine=ImageFont.Layout.BASIC)


@cache
def _folder() -> Path:
    # All that is wanted of it is where its files are.
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"
