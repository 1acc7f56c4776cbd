"""Programs that show pictures: ImageMagick and Chromium, of Debian's packages.

Each gives a picture as it shows it, upright and on white, as a file that every decoder reads.
"""

from __future__ import annotations

import base64
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from playwright.sync_api import Error, Page, sync_playwright

_SECONDS: Final = 60.0
_LIMITS: Final = ("-limit", "memory", "1GiB", "-limit", "disk", "2GiB", "-limit", "thread", "1")
# Of which a frame is a part of its canvas; of others, an offset is where they lie on a sheet of paper.
_TIFF: Final = frozenset({".tif", ".tiff"})
_WITH_CANVAS: Final = frozenset({".gif", ".webp"})
# Larger ones take seconds in a browser's canvas.
_MAX_BYTES: Final = 8 << 20

_DRAW: Final = """async encoded => {
  const bytes = Uint8Array.from(atob(encoded), each => each.charCodeAt(0));
  const url = URL.createObjectURL(new Blob([bytes]));
  const image = new Image();
  image.src = url;
  try {
    await image.decode();
    const canvas = new OffscreenCanvas(image.naturalWidth, image.naturalHeight);
    const context = canvas.getContext("2d");
    context.fillStyle = "white";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(image, 0, 0);
    const shown = new Uint8Array(await (await canvas.convertToBlob()).arrayBuffer());
    let text = "";
    for (let at = 0; at < shown.length; at += 32768)
      text += String.fromCharCode(...shown.subarray(at, at + 32768));
    return btoa(text);
  } catch (error) {
    return null;
  } finally {
    URL.revokeObjectURL(url);
  }
}"""


def imagemagick() -> str | None:
    """The program's name; None where it is not installed."""
    return next(filter(None, map(shutil.which, ("magick", "convert-im6.q16"))), None)


def by_imagemagick(program: str, path: Path, page: int) -> bytes | None:
    """Return a page of a file as a BMP file; None for what it does not read, or not without an error."""
    flat = ["-flatten"] if path.suffix.lower() in _WITH_CANVAS else ["+repage", "-alpha", "remove"]
    asked = [program, *_LIMITS, f"{path}[{page}]"]
    colours: Sequence[str] = ("-colorspace", "sRGB")
    if path.suffix.lower() in _TIFF and _ran([*asked, "-format", "%[colorspace]", "info:"]) == b"YCbCr":
        # What libtiff has made RGB of is called so still, and would be made RGB of again.
        colours = ("-set", "colorspace", "sRGB")
    words = [*asked, *colours, "-background", "white", *flat, "-auto-orient"]
    found = _ran([*words, "-type", "TrueColor", "-depth", "8", "BMP3:-"])
    return found if found is not None and found.startswith(b"BM") else None


def _ran(words: Sequence[str]) -> bytes | None:
    try:
        ran = subprocess.run(words, capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None
    return ran.stdout if ran.returncode == 0 else None


class Chromium:
    """A browser that draws pictures on a white canvas, its colours as sRGB."""

    def __init__(self) -> None:
        """Raises ``OSError`` where it is not installed."""
        program = shutil.which("chromium")
        if program is None:
            raise OSError("chromium is not installed")
        self._playwright = sync_playwright().start()
        # Its sandbox cannot be used by root, whom containers run as.
        self._browser = self._playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--force-color-profile=srgb"]
        )
        self._page: Page | None = None

    def shown(self, data: bytes) -> bytes | None:
        """Return a file as a PNG file; None for what it does not show."""
        if len(data) > _MAX_BYTES:
            return None
        if self._page is None:
            self._page = self._browser.new_page()
            self._page.set_default_timeout(_SECONDS * 1000)
        try:
            found = self._page.evaluate(_DRAW, base64.b64encode(data).decode())
        except Error:
            # The page has crashed.
            with suppress(Error):
                self._page.close()
            self._page = None
            return None
        return None if found is None else base64.b64decode(found)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._browser.close()
        self._playwright.stop()
