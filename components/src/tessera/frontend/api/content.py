"""What one input may look like, with its role and its instruction.

An input is a string, token ids, an object, a list of content parts or a conversation.

**Parts.** Texts and images keep the client's order; what a prompt makes of it is the family's to say.

**Conversations.** One message is the input. A ``system`` or ``developer`` message before it is the
instruction, and an empty ``assistant`` message after it says nothing: vLLM's clients of Qwen3-VL-Embedding
send both. Other lists of several messages are refused: they are more often a batch that lacks its inner lists
than a dialogue.

**Strings.** A word that is an image data URL is an image; the rest, without the white space that set the
words apart, is text, with a line break before each piece of it but the first. ``modality: text`` takes a
string literally, so that text *about* data URLs can be embedded. An ``http`` URL is text unless ``modality``
says that an image is there.

**Instructions.** The first that is given counts: a ``system`` message, ``instruction`` beside the input's
text or content, ``instruction`` of the body. Token ids are taken as they are, so one beside them is an error.

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

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec
import numpy as np

from tessera.errors import InvalidInput
from tessera.frontend.api.values import (
    INT32,
    Json,
    JsonObject,
    expected,
    integer,
    is_list,
    join,
    known_object,
    reject_unknown,
    string,
)
from tessera.frontend.media import GRID, MAX_SIDE
from tessera.frontend.media.loader import refuse_path
from tessera.frontend.request import BARE_BASE64, ImageSource, Input, Modality, RequestLimits
from tessera.models.base import Role, TokenIds
from tessera.models.declared import NAMED_ROLES

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


class InputBuilder(msgspec.Struct, frozen=True, kw_only=True):
    """Makes inputs under the limits; ``role`` and ``instruction`` are for those that state none."""

    role: Role | None
    instruction: str | None = None
    prompt_name: str | None = None
    limits: RequestLimits

    @classmethod
    def of(cls, instruction: Json, role: Role | None, limits: RequestLimits) -> InputBuilder:
        """Make one for the inputs of a body with its instruction and the role that it asks for."""
        builder = cls(role=role, limits=limits)
        if instruction is None:
            return builder
        return msgspec.structs.replace(builder, instruction=builder.read_instruction(instruction, ""))

    def named(self, prompt: str) -> InputBuilder:
        """Return one for inputs with a prompt of this name, which may be that of a role."""
        return msgspec.structs.replace(self, prompt_name=prompt, role=self.role or NAMED_ROLES.get(prompt))

    def text(self, text: str, param: str) -> str:
        """The text itself, if it is neither empty nor too long."""
        if not text:
            raise InvalidInput.at(param, "expected text, found an empty string")
        return self.bounded(text, param)

    def bounded(self, text: str, param: str) -> str:
        """The text itself, if it is not too long."""
        self._check_size(len(text), param)
        return text

    def build(
        self,
        parts: Sequence[str | ImageSource],
        param: str,
        *,
        stated: Role | None = None,
        instruction: str | None = None,
    ) -> Input:
        """One input out of texts, images or both; at least one must be there.

        ``stated`` and ``instruction`` are the input's own.
        """
        images = tuple([part for part in parts if isinstance(part, ImageSource)])
        # What the message says, or the body or the model's name.
        role = self.role if stated is None else stated
        if role is None:
            role = Role.PASSAGE if images else Role.NONE
        entry = Input(
            parts=tuple(filter(None, parts)),
            role=role,
            instruction=self.instruction if instruction is None else instruction,
            prompt_name=self.prompt_name,
            param=param,
            images=images,
            size=sum([len(part) for part in parts if isinstance(part, str)]),
        )
        limits = self.limits
        if not entry.parts or entry.size > limits.characters or len(images) > limits.images_per_input:
            self._check(entry)
        return entry

    def _check(self, entry: Input) -> None:
        """Raise for an input with too many images, with nothing in it, or with too much text."""
        param, most = entry.param, self.limits.images_per_input
        if len(entry.images) > most:
            raise InvalidInput.at(
                param, f"expected at most {most} images in one input, found {len(entry.images)}"
            )
        if not entry.parts:
            raise expected(param, "text", "")
        self._check_size(entry.size, param)

    def read_instruction(self, value: Json, param: str) -> str | None:
        """Read the ``instruction`` of an object; None where it is null or absent."""
        path = join(param, "instruction")
        return None if value is None else self.text(string(value, path), path)

    def _check_size(self, size: int, param: str) -> None:
        if size > self.limits.characters:
            raise InvalidInput.at(
                param, f"expected at most {self.limits.characters} characters, found {size}"
            )


def check_modality(found: Input, modality: Modality) -> Input:
    """The input itself, if it is what the client said it is."""
    wants_image = modality is not Modality.TEXT
    wants_text = modality is not Modality.IMAGE
    if wants_text and not found.size:
        raise InvalidInput.at(found.param, f"the text part must be non-empty for modality {modality.value}")
    if not wants_text and found.size:
        raise InvalidInput.at(found.param, "modality image expects an image alone, found text as well")
    if wants_image != bool(found.images):
        raise InvalidInput.at(
            found.param,
            f"modality {modality.value} expects {'an' if wants_image else 'no'} image, "
            f"found {len(found.images) or 'none'}",
        )
    return found


_URL_KINDS = ("data:", "http://", "https://", "file://")
_DETAILS = (None, "auto")
_UUID_CHARACTERS = 256


def read_parts(value: Sequence[Json], param: str, builder: InputBuilder) -> list[str | ImageSource]:
    """The texts and images of a list of parts; texts may be empty, but not all there is."""
    if not value:
        raise expected(param, "at least one content part", value)
    parts: list[str | ImageSource] = []
    for index, part in enumerate(value):
        path = f"{param}[{index}]"
        if not isinstance(part, dict):
            raise expected(path, "a content part, an object with a type", part)
        kind = part.get("type")
        read = _READERS.get(kind) if isinstance(kind, str) else None
        if read is None:
            raise expected(f"{path}.type", f"one of {', '.join(_READERS)}", kind)
        parts.append(read(part, path, builder))
    if not any(parts):
        raise expected(f"{param}[0].text", "text", "")
    return parts


def image_at(value: Json, param: str, *, uuid: str | None = None, bare: bool = False) -> ImageSource:
    """An image named by URL or absolute path; ``bare`` also takes base64 without a ``data:`` prefix.

    With a ``uuid`` the payload may be null: it then stands for what was sent under that name before.
    """
    if value is None and uuid is not None:
        return ImageSource(url="", param=param, uuid=uuid)
    if not isinstance(value, str) or not value:
        raise expected(param, "an image: a data, http, https or file URL", value)
    # The base64 of every JPEG file begins with "/9j/", which would otherwise pass for a path.
    is_path = value.startswith("/") and not (bare and value.startswith("/9j/"))
    if not is_path and not value[:8].lower().startswith(_URL_KINDS):
        if not bare or ":" in value[:16]:
            raise _no_image(value, param)
        value = f"{BARE_BASE64}{value}"
    return ImageSource(url=value, param=param, uuid=uuid)


def _no_image(value: str, param: str) -> InvalidInput:
    if "://" not in value:
        refuse_path(value, param)
    # What stands there may hold a password or an image, so it is not repeated.
    return InvalidInput.at(
        param, f"expected a data, http, https or file URL, found another string of {len(value)} characters"
    )


def _text(part: JsonObject, param: str, builder: InputBuilder) -> str:
    reject_unknown(part, ("type", "text"), param)
    # Beside an image, clients send an empty one.
    return builder.bounded(string(part.get("text"), f"{param}.text"), f"{param}.text")


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


def _image(part: JsonObject, param: str, builder: InputBuilder) -> ImageSource:
    """Read ``{"type": "image", "image": "..."}``, or the same with ``image_base64``."""
    key = str(part["type"])
    reject_unknown(part, ("type", key, "uuid"), param)
    return image_at(part.get(key), f"{param}.{key}", uuid=_uuid(part, param), bare=True)


def _image_embeds(part: JsonObject, param: str, builder: InputBuilder) -> ImageSource:
    """vLLM's part for rows that the client computed; here a safetensors file instead of a pickled tensor.

    For Qwen's models it is an object there, with the rows' grid: here numbers, as many as its tensor has.
    """
    reject_unknown(part, ("type", "image_embeds", "uuid"), param)
    uuid = _uuid(part, param)
    value, path, grid = part.get("image_embeds"), f"{param}.image_embeds", None
    if isinstance(value, dict):
        reject_unknown(value, ("image_embeds", GRID), path)
        grid = _grid(value.get(GRID), f"{path}.{GRID}")
        value, path = value.get("image_embeds"), f"{path}.image_embeds"
    return msgspec.structs.replace(image_at(value, path, bare=True), uuid=uuid, embeddings=True, grid=grid)


def _grid(value: Json, param: str) -> tuple[int, int, int] | None:
    if value is None:
        return None
    sides = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not is_list(sides) or len(sides) != 3:
        raise expected(param, "a grid, [t, h, w] in patches", value)
    t, h, w = (
        integer(side, f"{param}[{index}]", low=1, high=MAX_SIDE - 1, what="a number of patches")
        for index, side in enumerate(sides)
    )
    return t, h, w


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
    "image_base64": _image,
    "image": _image,
    "image_embeds": _image_embeds,
}


def is_message(value: Json) -> bool:
    return isinstance(value, dict) and ("role" in value or "content" in value)


def read_conversation(value: Sequence[Json], param: str, builder: InputBuilder) -> Input:
    first, last = 0, len(value)
    if last > 1 and _speaker(value[0]) in _INSTRUCTING:
        first = 1
    if last - first > 1 and _speaker(value[-1]) == "assistant" and _says_nothing(value[-1]):
        last -= 1
    if last - first != 1:
        raise InvalidInput.at(
            param,
            "expected a conversation of one message, perhaps after a system message, "
            f"found {len(value)}; a batch is a list of conversations, [[message], [message]]",
        )
    if not first:
        return read_message(value[0], f"{param}[0]", builder, owner=param)
    instruction = _instruction(value[0], f"{param}[0]", builder)
    return read_message(value[1], f"{param}[1]", builder, owner=param, instruction=instruction)


_INSTRUCTING: Final = ("system", "developer")


def _speaker(message: Json) -> Json:
    return message.get("role") if isinstance(message, dict) else None


def _says_nothing(message: Json) -> bool:
    """Whether a message is what a client ends a conversation with to have its end tokenised."""
    return (
        isinstance(message, dict)
        and message.keys() <= {"role", "content"}
        and message.get("content") in (None, "", [], [{"type": "text", "text": ""}])
    )


def _instruction(message: Json, param: str, builder: InputBuilder) -> str:
    found, path = read_message(message, param, builder), f"{param}.content"
    if found.images:
        raise InvalidInput.at(path, "expected text as the instruction, found an image")
    return "".join(part for part in found.parts if isinstance(part, str))


def read_message(
    value: Json,
    param: str,
    builder: InputBuilder,
    *,
    owner: str | None = None,
    bare: bool = False,
    instruction: str | None = None,
) -> Input:
    """One message as one input, which is called ``owner`` in errors that concern it as a whole.

    ``bare`` allows an item without a role, as in Cohere's ``{"content": [...]}``. ``instruction`` is the
    system message's.
    """
    what = "a message, an object with role and content"
    value = known_object(value, param, what, ("role", "content", "instruction"))
    stated = None
    if not bare or "role" in value:
        role = value.get("role")
        if not isinstance(role, str) or role not in MESSAGE_ROLES:
            raise expected(f"{param}.role", f"one of {', '.join(MESSAGE_ROLES)}", role)
        stated = MESSAGE_ROLES[role]
    own = builder.read_instruction(value.get("instruction"), param)
    content, path = value.get("content"), f"{param}.content"
    parts: list[str | ImageSource]
    if isinstance(content, str):
        parts = [builder.text(content, path)]
    elif isinstance(content, list):
        parts = read_parts(content, path, builder)
    else:
        raise expected(path, "a string or a list of content parts", content)
    return builder.build(
        parts, owner or param, stated=stated, instruction=own if instruction is None else instruction
    )


def split_messages(value: Json) -> list[tuple[Json, str]]:
    """The conversations in a body's ``messages``: one when it lists messages, several when it lists lists."""
    if not is_list(value) or not value:
        raise expected("messages", "a non-empty list of messages or of conversations", value)
    if not is_list(value[0]):
        return [(value, "messages")]
    return [(conversation, f"messages[{index}]") for index, conversation in enumerate(value)]


def read_object(value: JsonObject, param: str, builder: InputBuilder) -> Input:
    """``image`` is a URL, a local path, or base64 without a prefix; a null key counts as absent."""
    reject_unknown(value, ("text", "image", "instruction"), param)
    text, image = value.get("text"), value.get("image")
    if text is None and image is None:
        raise expected(param, "an object with text, image or both", value)
    # Keys have no order; SGLang and Qwen's own code put the image first.
    parts: list[str | ImageSource] = [] if image is None else [image_at(image, f"{param}.image", bare=True)]
    if text is not None:
        parts.append(builder.text(string(text, f"{param}.text"), f"{param}.text"))
    return builder.build(parts, param, instruction=builder.read_instruction(value.get("instruction"), param))


_DATA = "data:image/"
_HEADER_CHARACTERS = 160
_SPACES = " \n\t\r\f\v"


def read_string(value: str, param: str, builder: InputBuilder, modality: Modality | None) -> Input:
    if modality is Modality.TEXT or (modality is None and _DATA not in value):
        return builder.build((value,), param)
    parts = _split(value, param, (_DATA,))
    if modality is not None and parts == [value]:
        parts = _split(value, param, ("http://", "https://"))
    return builder.build(parts, param)


def _split(value: str, param: str, prefixes: tuple[str, ...]) -> list[str | ImageSource]:
    """A string's words that are URLs with one of the prefixes, as images, and the texts around them.

    Written with ``find``, which passes over a payload of megabytes some fifty times faster than a regular
    expression does. A string without such words is returned unchanged.
    """
    parts: list[str | ImageSource] = []
    texts = 0
    begin = at = 0
    urls, spaces = _Places(value, prefixes), _Places(value, _SPACES)

    def add(text: str) -> None:
        nonlocal texts
        if text := text.strip():
            parts.append(f"\n{text}" if texts else text)
            texts += 1

    while (at := urls.first(at)) < len(value):
        end = spaces.first(at)
        if _is_url(value, at, end):
            add(value[begin:at])
            parts.append(ImageSource(url=value[at:end], param=param))
            begin = end
        at = end
    if not parts:
        return [value]
    add(value[begin:])
    return parts


class _Places:
    """Finds marks in a string from its beginning to its end, and looks at no piece of it twice for one."""

    def __init__(self, value: str, marks: Iterable[str]) -> None:
        self._value = value
        self._next = dict.fromkeys(marks, -1)

    def first(self, at: int) -> int:
        """Return where the first of the marks stands from ``at`` on; the length where none does."""
        for mark, place in self._next.items():
            if place < at:
                found = self._value.find(mark, at)
                self._next[mark] = found if found >= 0 else len(self._value)
        return min(self._next.values())


def _is_url(value: str, at: int, end: int) -> bool:
    """Whether the word from ``at`` begins there, and for a data URL, whether it has a payload."""
    if at > 0 and value[at - 1] not in _SPACES:
        return False
    if not value.startswith(_DATA, at):
        return True
    comma = value.find(",", at, min(end, at + _HEADER_CHARACTERS))
    return 0 <= comma < end - 1


def read_tokens(value: Sequence[Json], param: str, builder: InputBuilder) -> Input:
    """Token ids get no prefix, no instruction and no special tokens, so their role is always NONE.

    Ids beyond the vocabulary are found later, where the vocabulary is known.
    """
    if len(value) > builder.limits.characters:
        raise expected(param, f"at most {builder.limits.characters} token ids", value)
    ids = _whole_numbers(value)
    if ids is None or ids.min() < 0 or ids.max() > INT32:
        raise _no_token_id(value, param)
    if builder.instruction is not None:
        raise InvalidInput(
            f"{param}: token ids are taken as they are, without an instruction", param="instruction"
        )
    return Input(parts=(ids,), role=Role.NONE, param=param, size=len(ids))


def _whole_numbers(value: Sequence[Json]) -> TokenIds | None:
    """Return int64 ``[n]``, None where a value is no whole number or too large."""
    if isinstance(value, array):
        return np.array(value) if value.typecode == "q" else None
    # ``type`` because a JSON ``true`` is an ``int`` to ``isinstance``.
    if set(map(type, value)) != {int}:
        return None
    try:
        return np.array(value, np.int64)
    except OverflowError:
        return None


def _no_token_id(value: Sequence[Json], param: str) -> InvalidInput:
    """Return the error of the first value that is none."""
    what = "a token id, an integer of at least 0"
    for index, token in enumerate(value):
        # Where one has a fraction, all of an array are floats.
        if isinstance(value, array) and isinstance(token, float) and token.is_integer() and token >= 0:
            continue
        try:
            integer(token, f"{param}[{index}]", low=0, high=INT32, what=what)
        except InvalidInput as error:
            return error
    return expected(param, f"token ids, each {what}", value)
