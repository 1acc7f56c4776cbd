"""Reads inputs as a Python program writes them: texts, images in whichever form, and both together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final
from urllib.parse import unquote

from PIL import Image

from tessera import imaging
from tessera.errors import InvalidInput, MediaFetchError
from tessera.frontend.api.values import expected, reject_unknown
from tessera.local.content import Content, ImageFile, ImageURL, Part
from tessera.models.base import Role

ImageLike = str | bytes | os.PathLike[str] | Image.Image
"""A path, the bytes of an image file, or an image of Pillow's; a string where nothing but an image stands is
a path or a data, http, https or file URL."""
PartLike = ImageLike | Mapping[str, ImageLike]
InputLike = PartLike | Sequence[PartLike]
"""What is embedded as one: a text, an image, ``{"text": ..., "image": ...}``, or a list of such in the order
in which they are read as one. A string is a text, whatever it holds."""

_URLS: Final = ("http://", "https://", "data:")
_FILE: Final = "file://"
_SINGLE: Final = (str, bytes, bytearray, memoryview, os.PathLike, Image.Image, Mapping)
_IMAGE: Final = "an image: a path, bytes, a PIL image, or a URL"


def read_inputs(
    values: Iterable[InputLike], name: str, role: Role, instruction: str | None
) -> Iterator[Content]:
    """Read inputs one by one, as they are taken; errors call them ``name[0]`` and so on.

    Raises ``InvalidInput`` for what is none, and ``MediaFetchError`` for a file that cannot be read.
    """
    if isinstance(values, _SINGLE) or not isinstance(values, Iterable):
        raise expected(name, "a list of inputs, of one where there is one", values)
    for index, value in enumerate(values):
        yield read_input(value, f"{name}[{index}]", role, instruction)


def read_input(value: InputLike, param: str, role: Role, instruction: str | None) -> Content:
    """Read one input; raises as ``read_inputs``."""
    if isinstance(value, list | tuple):
        parts = tuple([part for entry in value for part in _parts(entry, param)])
    else:
        parts = _parts(value, param)
    if not any(parts):
        raise expected(param, "a text or an image", value)
    return Content(parts=parts, role=role, instruction=instruction, param=param)


def _parts(value: object, param: str) -> tuple[Part | ImageURL, ...]:
    if isinstance(value, str):
        return (_text(value, param),)
    if not isinstance(value, Mapping):
        return (_image(value, param, "a text, an image, an object with text and image, or a list of these"),)
    reject_unknown(dict(value), ("text", "image"), param)
    text, image = value.get("text"), value.get("image")
    # Keys have no order: the image stands first, as at the service.
    parts: list[Part | ImageURL] = [] if image is None else [_image(image, param, _IMAGE, named=True)]
    return (*parts,) if text is None else (*parts, _text(text, param))


def _text(value: object, param: str) -> str:
    if not isinstance(value, str):
        raise expected(param, "text", value)
    try:
        if not value.isascii():
            value.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{param}: half of a surrogate pair stands in the text", param=param) from None
    # A subclass, such as NumPy's, cannot be sent.
    return value if type(value) is str else str.__str__(value)


def _image(value: object, param: str, wanted: str, *, named: bool = False) -> ImageFile | ImageURL:
    if isinstance(value, str) and named:
        if value[:8].lower().startswith(_URLS):
            return ImageURL(_text(value, param))
        path = unquote(value.removeprefix(_FILE)) if value.startswith(_FILE) else value
        return ImageFile(_read(path, param))
    if isinstance(value, bytes | bytearray | memoryview):
        return ImageFile(bytes(value))
    if isinstance(value, os.PathLike):
        return ImageFile(_read(os.fspath(value), param))
    if isinstance(value, Image.Image):
        return ImageFile(imaging.bitmap(value, param=param))
    raise expected(param, wanted, value)


def _read(path: str, param: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MediaFetchError(f"{param}: {path} cannot be read: {reason}", param=param) from error
