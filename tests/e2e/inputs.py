"""Inputs in OpenAI's and vLLM's forms, with what the reference needs to compute the same."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from tests.references.llama_nemotron_vl import Reference


def data_url(data: bytes) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(data).decode()


@dataclass(frozen=True, slots=True)
class Case:
    """One input: how a request writes it and what it stands for."""

    name: str
    value: Any
    text: str | None
    images: tuple[bytes, ...]
    role: str

    def expected(self, reference: Reference) -> npt.NDArray[np.float32]:
        return reference.vector(self.text, list(self.images), self.role)


def parts(text: str | None, *images: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(data)}} for data in images
    ]
    return found + ([{"type": "text", "text": text}] if text is not None else [])


def picture(seed: int, size: int = 96) -> bytes:
    """A small PNG that no other seed gives."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def image_input(data: bytes, text: str | None = None) -> list[dict[str, object]]:
    """A PNG and its text."""
    made = parts(text, data)
    made[0]["image_url"]["url"] = "data:image/png;base64," + base64.b64encode(data).decode()
    return made


def cases(photos: dict[str, bytes]) -> list[Case]:
    china, flower = photos["china"], photos["flower"]
    return [
        Case(
            "text",
            "The quick brown fox jumps over the lazy dog.",
            *_text("The quick brown fox jumps over the lazy dog."),
        ),
        Case("unicode", "naïve 🦊 日本語", *_text("naïve 🦊 日本語")),
        Case("one character", "a", *_text("a")),
        Case("long text", "word " * 700, *_text("word " * 700)),
        Case("image", parts(None, china), None, (china,), "passage"),
        Case("other image", parts(None, flower), None, (flower,), "passage"),
        Case("image and text", parts("a red flower", flower), "a red flower", (flower,), "passage"),
        Case("two images", parts("compare", china, flower), "compare", (china, flower), "passage"),
    ]


def _text(text: str) -> tuple[str, tuple[bytes, ...], str]:
    return text, (), "none"


def cosine(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def scaled(photo: bytes, width: int, height: int) -> bytes:
    """The photo as a JPEG of this size."""
    buffer = io.BytesIO()
    Image.open(io.BytesIO(photo)).resize((width, height)).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()
