"""What one input may look like, and its role: strings, token ids, objects, content parts, conversations.

**Parts.** Texts are joined without a separator and images keep their order, images before text in the prompt:
vLLM's template for this model does the same. More than one message is refused, as by that template: a flat
list of several messages is more often a batch that lacks its inner lists than a dialogue.

**Strings.** A word that is an image data URL is an image; the rest, without the white space that set the
words apart, is the text. The order of the two does not matter. ``modality: text`` takes a string literally,
so that text *about* data URLs can be embedded. An ``http`` URL is text unless ``modality`` says that an
image is there.

**Roles.** The first line that applies decides:

==========================================  =========  ==============================================
what the request says                       role       why
==========================================  =========  ==============================================
message role ``query``                      QUERY      the most specific statement there is
message role ``document``, ``passage``      PASSAGE    likewise
``input_type`` (or ``task``) of the body    as named   NIM's and Cohere's way to say it
model name ending in ``-query``/-passage    as named   older NIM clients
input with an image                         PASSAGE    the checkpoint's own processor always does so
anything else                               NONE       raw text after BOS: vLLM's plain completion form
==========================================  =========  ==============================================

Message roles such as ``user`` say nothing about retrieval, so they fall through to the lines below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from tessera.errors import InvalidInput
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
from tessera.frontend.request import BARE_BASE64, ImageSource, Input, Modality, RequestLimits
from tessera.models.base import Role

MESSAGE_ROLES: Final[dict[str, Role | None]] = {
    "query": Role.QUERY,
    "document": Role.PASSAGE,
    "passage": Role.PASSAGE,
    "user": None,
    "system": None,
    "developer": None,
    "assistant": None,
    "tool": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBuilder:
    """Makes inputs under the limits; ``role`` is the one that the body or the model's name asks for."""

    role: Role | None
    limits: RequestLimits

    def text(self, text: str, param: str) -> str:
        """The text itself, if it is neither empty nor too long."""
        if not text:
            raise InvalidInput(f"{param}: expected text, found an empty string", param=param)
        if len(text) > self.limits.characters:
            raise InvalidInput(
                f"{param}: expected at most {self.limits.characters} characters, found {len(text)}",
                param=param,
            )
        return text

    def build(
        self, text: str, images: tuple[ImageSource, ...], param: str, *, stated: Role | None = None
    ) -> Input:
        """One input out of text, images or both; at least one must be there."""
        if not images:
            self.text(text, param)
        elif len(images) > self.limits.images_per_input:
            raise InvalidInput(
                f"{param}: expected at most {self.limits.images_per_input} images in one input, "
                f"found {len(images)}",
                param=param,
            )
        elif text:
            self.text(text, param)
        role = _decide(stated, self.role, images=bool(images))
        return Input(text=text, images=images, role=role, param=param)


def check_modality(found: Input, modality: Modality | None) -> Input:
    """The input itself, if it is what the client said it is."""
    if modality is None:
        return found
    wants_image = modality is not Modality.TEXT
    wants_text = modality is not Modality.IMAGE
    if wants_text and not found.text:
        raise InvalidInput(
            f"{found.param}: the text part must be non-empty for modality {modality.value}", param=found.param
        )
    if not wants_text and found.text:
        raise InvalidInput(
            f"{found.param}: modality image expects an image alone, found text as well", param=found.param
        )
    if wants_image != bool(found.images):
        raise InvalidInput(
            f"{found.param}: modality {modality.value} expects {'an' if wants_image else 'no'} image, "
            f"found {len(found.images) or 'none'}",
            param=found.param,
        )
    return found


def _decide(stated: Role | None, requested: Role | None, *, images: bool) -> Role:
    """``stated`` comes from the message, ``requested`` from the body or the model's name."""
    if stated is not None:
        return stated
    if requested is not None:
        return requested
    return Role.PASSAGE if images else Role.NONE


def message_role(value: Json, param: str) -> Role | None:
    if not isinstance(value, str) or value not in MESSAGE_ROLES:
        raise expected(param, f"one of {', '.join(MESSAGE_ROLES)}", value)
    return MESSAGE_ROLES[value]


def named_role(value: Json, param: str, known: dict[str, Role]) -> Role | None:
    """The role that ``input_type`` or ``task`` names; None when the value is null."""
    if value is None:
        return None
    if not isinstance(value, str) or value not in known:
        raise expected(param, f"one of {', '.join(known)}", value)
    return known[value]


_URL_KINDS = ("data:", "http://", "https://", "file://")
_DETAILS = (None, "auto")
_UUID_CHARACTERS = 256


def read_parts(value: list[Json], param: str, builder: InputBuilder) -> tuple[str, tuple[ImageSource, ...]]:
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
        found = read(part, path, builder)
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


def _text(part: JsonObject, param: str, builder: InputBuilder) -> str:
    reject_unknown(part, ("type", "text"), param)
    return builder.text(string(part.get("text"), f"{param}.text"), f"{param}.text")


def _image_url(part: JsonObject, param: str, builder: InputBuilder) -> ImageSource:
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


def _image_base64(part: JsonObject, param: str, builder: InputBuilder) -> ImageSource:
    reject_unknown(part, ("type", "image_base64", "uuid"), param)
    return image_at(part.get("image_base64"), f"{param}.image_base64", uuid=_uuid(part, param), bare=True)


def _image(part: JsonObject, param: str, builder: InputBuilder) -> ImageSource:
    reject_unknown(part, ("type", "image", "uuid"), param)
    return image_at(part.get("image"), f"{param}.image", uuid=_uuid(part, param), bare=True)


def _image_embeds(part: JsonObject, param: str, builder: InputBuilder) -> ImageSource:
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


_Reader = Callable[[JsonObject, str, InputBuilder], str | ImageSource]
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


def read_conversation(value: list[Json], param: str, builder: InputBuilder) -> Input:
    if len(value) != 1:
        raise InvalidInput(
            f"{param}: expected a conversation of one message, found {len(value)}; "
            "a batch is a list of conversations, [[message], [message]]",
            param=param,
        )
    return read_message(value[0], f"{param}[0]", builder, owner=param)


def read_message(
    value: Json, param: str, builder: InputBuilder, *, owner: str | None = None, bare: bool = False
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
        return builder.build(builder.text(content, path), (), owner or param, stated=stated)
    if not isinstance(content, list):
        raise expected(path, "a string or a list of content parts", content)
    text, images = read_parts(content, path, builder)
    return builder.build(text, images, owner or param, stated=stated)


def split_messages(value: Json, param: str) -> list[tuple[Json, str]]:
    """The conversations in a body's ``messages``: one when it lists messages, several when it lists lists."""
    if not isinstance(value, list) or not value:
        raise expected(param, "a non-empty list of messages or of conversations", value)
    if not isinstance(value[0], list):
        return [(value, param)]
    return [(conversation, f"{param}[{index}]") for index, conversation in enumerate(value)]


def read_object(value: JsonObject, param: str, builder: InputBuilder) -> Input:
    """``image`` is a URL, a local path, or base64 without a prefix; a null key counts as absent."""
    reject_unknown(value, ("text", "image"), param)
    text, image = value.get("text"), value.get("image")
    if text is None and image is None:
        raise expected(param, "an object with text, image or both", value)
    images = () if image is None else (image_at(image, f"{param}.image", bare=True),)
    words = "" if text is None else builder.text(string(text, f"{param}.text"), f"{param}.text")
    return builder.build(words, images, param)


_DATA = "data:image/"
_HEADER_CHARACTERS = 160
_SPACES = " \n\t\r\f\v"


def read_string(value: str, param: str, builder: InputBuilder, modality: Modality | None) -> Input:
    if modality is Modality.TEXT or (modality is None and _DATA not in value):
        return builder.build(value, (), param)
    text, urls = _split(value, (_DATA,))
    if modality is not None and not urls:
        text, urls = _split(value, ("http://", "https://"))
    images = tuple(ImageSource(url=url, param=param) for url in urls)
    return check_modality(builder.build(text, images, param), modality)


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


def read_tokens(value: list[Json], param: str, builder: InputBuilder) -> Input:
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
    if len(tokens) > builder.limits.characters:
        raise expected(param, f"at most {builder.limits.characters} token ids", value)
    return Input(text=tuple(tokens), role=Role.NONE, param=param)
