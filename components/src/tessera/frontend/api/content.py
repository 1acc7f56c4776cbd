"""Content parts, as in OpenAI messages, DeepInfra items and Voyage contents: one list is one input.

The texts are joined without a separator and the images keep their order, images before text in the
prompt: what vLLM's template for this model does with the same parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from tessera.errors import InvalidInput
from tessera.frontend.api.request import BARE_BASE64, ImageSource
from tessera.frontend.api.values import Json, JsonObject, expected, join, reject_unknown, string
from tessera.frontend.shapes.scope import Scope

_URL_KINDS = ("data:", "http://", "https://", "file://")
_DETAILS = (None, "auto")
_UUID_CHARACTERS = 256


def read_parts(value: list[Json], param: str, scope: Scope) -> tuple[str, tuple[ImageSource, ...]]:
    """The joined text and the images of a list of parts."""
    if not value:
        raise expected(param, "at least one content part", value)
    texts: list[str] = []
    images: list[ImageSource] = []
    for index, part in enumerate(value):
        path = f"{param}[{index}]"
        if not isinstance(part, dict):
            raise expected(path, "a content part, an object with a type", part)
        kind = part.get("type")
        read = _READERS.get(kind) if isinstance(kind, str) else None
        if read is None:
            raise expected(f"{path}.type", f"one of {', '.join(_READERS)}", kind)
        found = read(part, path, scope)
        if isinstance(found, ImageSource):
            images.append(found)
        else:
            texts.append(found)
    return "".join(texts), tuple(images)


def image_at(
    value: Json, param: str, *, uuid: str | None = None, bare: bool = False, embeddings: bool = False
) -> ImageSource:
    """An image named by URL or absolute path; ``bare`` also takes base64 without a ``data:`` prefix.

    With a ``uuid`` the payload may be null: it then stands for what was sent under that name before.
    """
    if value is None and uuid is not None and not embeddings:
        return ImageSource(url="", param=param, uuid=uuid)
    source = _source(value, param, bare=bare)
    return replace(source, uuid=uuid, embeddings=embeddings)


def _source(value: Json, param: str, *, bare: bool) -> ImageSource:
    if not isinstance(value, str) or not value:
        raise expected(param, "an image: a data, http, https or file URL", value)
    if value[:8].lower().startswith(_URL_KINDS):
        return ImageSource(url=value, param=param)
    # The base64 of every JPEG file begins with "/9j/", which would otherwise pass for a path.
    if value.startswith("/") and not (bare and value.startswith("/9j/")):
        return ImageSource(url=value, param=param)
    if bare and ":" not in value[:16]:
        return ImageSource(url=f"{BARE_BASE64}{value}", param=param)
    # What stands there may hold a password or an image, so it is not repeated.
    raise InvalidInput(
        f"{param}: expected a data, http, https or file URL, found another string of {len(value)} characters",
        param=param,
    )


def _text(part: JsonObject, param: str, scope: Scope) -> str:
    reject_unknown(part, ("type", "text"), param)
    return scope.text(string(part.get("text"), f"{param}.text"), f"{param}.text")


def _image_url(part: JsonObject, param: str, scope: Scope) -> ImageSource:
    """``{"type": "image_url", "image_url": "..." | {"url": "...", "detail"?: "auto"}, "uuid"?: "..."}``."""
    reject_unknown(part, ("type", "image_url", "detail", "uuid"), param)
    uuid = _uuid(part, param)
    _detail(part, param)
    value, path = part.get("image_url"), f"{param}.image_url"
    if isinstance(value, dict):
        reject_unknown(value, ("url", "detail"), path)
        _detail(value, path)
        value, path = value.get("url"), f"{path}.url"
    return image_at(value, path, uuid=uuid)


def _image_base64(part: JsonObject, param: str, scope: Scope) -> ImageSource:
    reject_unknown(part, ("type", "image_base64", "uuid"), param)
    return image_at(part.get("image_base64"), f"{param}.image_base64", uuid=_uuid(part, param), bare=True)


def _image(part: JsonObject, param: str, scope: Scope) -> ImageSource:
    reject_unknown(part, ("type", "image", "uuid"), param)
    return image_at(part.get("image"), f"{param}.image", uuid=_uuid(part, param), bare=True)


def _image_embeds(part: JsonObject, param: str, scope: Scope) -> ImageSource:
    """vLLM's part for rows that the client computed; here a safetensors file instead of a pickled tensor."""
    reject_unknown(part, ("type", "image_embeds", "uuid"), param)
    uuid = _uuid(part, param)
    return image_at(part.get("image_embeds"), f"{param}.image_embeds", uuid=uuid, bare=True, embeddings=True)


def _detail(holder: JsonObject, param: str) -> None:
    # The tiling is the model's own; a client that asks for another one must not believe it got it.
    if holder.get("detail") not in _DETAILS:
        raise expected(join(param, "detail"), "auto, the only detail there is", holder["detail"])


def _uuid(part: JsonObject, param: str) -> str | None:
    value = part.get("uuid")
    if value is not None and (not isinstance(value, str) or not 0 < len(value) <= _UUID_CHARACTERS):
        raise expected(f"{param}.uuid", f"a string of 1 to {_UUID_CHARACTERS} characters", value)
    return value


_Reader = Callable[[JsonObject, str, Scope], str | ImageSource]
_READERS: Final[dict[str, _Reader]] = {
    "text": _text,
    "input_text": _text,
    "image_url": _image_url,
    "input_image": _image_url,
    "image_base64": _image_base64,
    "image": _image,
    "image_embeds": _image_embeds,
}
PART_TYPES: Final = tuple(_READERS)
