"""Strings: OpenAI's plain text, and NIM's text, image data URL, or text and data URL in one string.

A word of the string that is an image data URL is an image; what is left, without the white space that
set the words apart, is the text. The order of the two does not matter. ``modality: text`` takes a
string literally, so that text *about* data URLs can be embedded. An ``http`` URL is plain text unless
``modality`` says that an image is there.
"""

from __future__ import annotations

from tessera.frontend.api.request import ImageSource, Input
from tessera.frontend.shapes.scope import Modality, Scope, check_modality

_DATA = "data:image/"
_HEADER_CHARACTERS = 160
_SPACES = " \n\t\r\f\v"


def read_string(value: str, param: str, scope: Scope, modality: Modality | None) -> Input:
    if modality is Modality.TEXT or (modality is None and _DATA not in value):
        return scope.fused(value, (), param)
    text, urls = _split(value, (_DATA,))
    if modality is not None and not urls:
        text, urls = _split(value, ("http://", "https://"))
    images = tuple(ImageSource(url=url, param=param) for url in urls)
    return check_modality(scope.fused(text, images, param), modality)


def _split(value: str, prefixes: tuple[str, ...]) -> tuple[str, list[str]]:
    """The text of a string, and its words that are URLs with one of the prefixes.

    Written with ``find``, which passes over a payload of megabytes some fifty times faster than a regular
    expression does. A string without such words is returned unchanged.
    """
    urls: list[str] = []
    texts: list[str] = []
    begin = at = 0
    while (at := _next(value, prefixes, at)) >= 0:
        end = _word_end(value, at)
        if _is_url(value, at, end):
            urls.append(value[at:end])
            texts.append(value[begin:at].strip())
            begin = end
        at = end
    if not urls:
        return value, urls
    texts.append(value[begin:].strip())
    return "\n".join(text for text in texts if text), urls


def _next(value: str, prefixes: tuple[str, ...], at: int) -> int:
    found = [position for prefix in prefixes if (position := value.find(prefix, at)) >= 0]
    return min(found, default=-1)


def _word_end(value: str, at: int) -> int:
    found = [position for space in _SPACES if (position := value.find(space, at)) >= 0]
    return min(found, default=len(value))


def _is_url(value: str, at: int, end: int) -> bool:
    """Whether the word from ``at`` begins there, and for a data URL, whether it has a payload."""
    if at > 0 and value[at - 1] not in _SPACES:
        return False
    if not value.startswith(_DATA, at):
        return True
    comma = value.find(",", at, min(end, at + _HEADER_CHARACTERS))
    return 0 <= comma < end - 1
