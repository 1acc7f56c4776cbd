"""Small versions of pictures for the results."""

from __future__ import annotations

import warnings
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageOps


def thumbnail(path: Path, width: int, height: int) -> Image.Image | None:
    """The picture upright and within ``width`` x ``height`` pixels, RGB; None when it cannot be read."""
    try:
        with warnings.catch_warnings():
            # The service has read it already, and nothing larger than the thumbnail is kept.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path) as opened:
                opened.draft("RGB", (2 * width, 2 * height))
                upright = ImageOps.exif_transpose(opened)
                return ImageOps.contain(_on_white(upright), (width, height))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None


def _on_white(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image.convert("RGB")
    layered = image.convert("RGBA")
    white = Image.new("RGBA", layered.size, "white")
    return Image.alpha_composite(white, layered).convert("RGB")


def jpeg(image: Image.Image) -> bytes:
    buffer = BytesIO()
    image.save(buffer, "JPEG", quality=82)
    return buffer.getvalue()
