"""The real inputs that scales are calibrated with: a directory's images, and the lines of its .txt files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.errors import ConfigError
from tessera.imaging import Picture
from tessera.models.base import Content, Int32Array, Model, Truncate

_IMAGES: Final = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """``images`` are files, ``lines`` texts, each by the name that errors call it."""

    images: tuple[Path, ...]
    lines: Mapping[str, str]

    @classmethod
    def read(cls, source: Path) -> Calibration:
        """Read a directory, or one .txt file; raises ``ConfigError`` for what is neither."""
        if source.suffix == ".txt" and source.is_file():
            files = [source]
        elif source.is_dir():
            files = sorted(source.iterdir())
        else:
            raise ConfigError(f"calibration: {source} is no directory and no .txt file")
        images = tuple(path for path in files if path.suffix.lower() in _IMAGES)
        texts = [path for path in files if path.suffix == ".txt"]
        lines = {
            f"{path}:{number}": line
            for path in texts
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if line.strip()
        }
        return cls(images=images, lines=lines)

    def pictures(self) -> list[Picture]:
        """Open the images."""
        return [Picture(path.read_bytes(), param=str(path)) for path in self.images]


def prompt_tokens(model: Model, content: Content, where: str) -> Int32Array:
    """The tokens of an input, cut at its end if it is too long; ``where`` is what errors call it."""
    return model.prompt(content, max_tokens=model.max_tokens, truncate=Truncate.END, param=where).tokens
