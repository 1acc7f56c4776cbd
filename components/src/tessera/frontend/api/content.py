"""What one input may look like: strings, token ids, objects, content parts, conversations.

The texts are joined without a separator and the images keep their order, images before text in the
prompt: what vLLM's template for this model does with the same parts.

More than one message is refused, as vLLM's template for this model does: a flat list of several messages
is more often a batch that lacks its inner lists than a dialogue, and a guess would give wrong vectors.

A word of the string that is an image data URL is an image; what is left, without the white space that
set the words apart, is the text. The order of the two does not matter. ``modality: text`` takes a
string literally, so that text *about* data URLs can be embedded. An ``http`` URL is plain text unless
``modality`` says that an image is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from tessera.errors import InvalidInput
from tessera.frontend.api.request import (
    BARE_BASE64,
    ImageSource,
    Input,
    Modality,
    Scope,
    check_modality,
    message_role,
)
from tessera.frontend.api.values import (
    INT32,
    Json,
    JsonObject,
    expected,
    integer,
    join,
    reject_unknown,
    string,
)
from tessera.models.base import Role

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


def is_message(value: Json) -> bool:
    return isinstance(value, dict) and ("role" in value or "content" in value)


def read_conversation(value: list[Json], param: str, scope: Scope) -> Input:
    if len(value) != 1:
        raise InvalidInput(
            f"{param}: expected a conversation of one message, found {len(value)}; "
            "a batch is a list of conversations, [[message], [message]]",
            param=param,
        )
    return read_message(value[0], f"{param}[0]", scope, owner=param)


def read_message(
    value: Json, param: str, scope: Scope, *, owner: str | None = None, bare: bool = False
) -> Input:
    """One message as one input, which is called ``owner`` in errors that concern it as a whole.

    ``bare`` allows an item without a role, as in Cohere's ``{"content": [...]}``.
    """
    if not isinstance(value, dict):
        raise expected(param, "a message, an object with role and content", value)
    reject_unknown(value, ("role", "content"), param)
    stated = None
    if not bare or "role" in value:
        stated = message_role(value.get("role"), f"{param}.role")
    content, path = value.get("content"), f"{param}.content"
    if isinstance(content, str):
        return scope.fused(scope.text(content, path), (), owner or param, stated=stated)
    if not isinstance(content, list):
        raise expected(path, "a string or a list of content parts", content)
    text, images = read_parts(content, path, scope)
    return scope.fused(text, images, owner or param, stated=stated)


def split_messages(value: Json, param: str) -> list[tuple[Json, str]]:
    """The conversations in a body's ``messages``: one when it lists messages, several when it lists lists."""
    if not isinstance(value, list) or not value:
        raise expected(param, "a non-empty list of messages or of conversations", value)
    if not isinstance(value[0], list):
        return [(value, param)]
    return [(conversation, f"{param}[{index}]") for index, conversation in enumerate(value)]


def read_object(value: JsonObject, param: str, scope: Scope) -> Input:
    """``image`` is a URL, a local path, or base64 without a prefix; a null key counts as absent."""
    reject_unknown(value, ("text", "image"), param)
    text, image = value.get("text"), value.get("image")
    if text is None and image is None:
        raise expected(param, "an object with text, image or both", value)
    images = () if image is None else (image_at(image, f"{param}.image", bare=True),)
    words = "" if text is None else scope.text(string(text, f"{param}.text"), f"{param}.text")
    return scope.fused(words, images, param)


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


def read_tokens(value: list[Json], param: str, scope: Scope) -> Input:
    """Token ids get no prefix and no special tokens, so their role is always NONE.

    Ids beyond the vocabulary are found later, where the vocabulary is known.
    """
    tokens = []
    for index, token in enumerate(value):
        # ``type(...) is`` because a JSON ``true`` is an ``int`` to ``isinstance``.
        if type(token) is not int or not 0 <= token <= INT32:
            what = "a token id, an integer of at least 0"
            token = integer(token, f"{param}[{index}]", low=0, high=INT32, what=what)
        tokens.append(token)
    if len(tokens) > scope.limits.characters:
        raise expected(param, f"at most {scope.limits.characters} token ids", value)
    return Input(text=tuple(tokens), role=Role.NONE, param=param)
