"""Prompts by a checkpoint's own chat template, rendered as ``transformers`` renders it; torch-free.

A template is rendered around marks that stand for the client's texts, so that control tokens are looked for
in what the template writes, never in what a client does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from tessera.checkpoint.section import Section
from tessera.checkpoint.tokenizer import TOKENIZER_CONFIG_FILE, PlainTokenizer
from tessera.errors import CheckpointError, InvalidInput
from tessera.models.base import ImagePlan
from tessera.models.marks import marks_of
from tessera.models.prompts import Fixed, Run, Segment
from tessera.small_files import read_regular

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATE_FILE: Final = "chat_template.jinja"
TEMPLATE_JSON_FILE: Final = "chat_template.json"
CHAT_FILES: Final = (TEMPLATE_FILE, TEMPLATE_JSON_FILE)
"""The files, beside that of the tokenizer's settings, that a template may be in."""

_KEY: Final = "chat_template"
_MOST_BYTES: Final = 1 << 20
_SPECIAL: Final = ("bos_token", "eos_token", "pad_token", "unk_token")
# Private characters, which no template changes, drops or splits.
_TEXT: Final = "\ue000\ue001\ue002"
_PROBE: Final = " [IMG] <s>a\n\n & 'b' \u200c"
_SHAPES: Final = 256


class ChatTemplate:
    """A compiled template with the tokenizer's special tokens, in ``jinja2``'s sandbox. Thread-safe."""

    def __init__(self, source: str, path: Path, special: Mapping[str, str]) -> None:
        """Raises ``CheckpointError`` for what is no template."""
        self.path = path
        self.special = special
        self._template = _compiled(source, path)

    @classmethod
    def read(cls, directory: Path) -> ChatTemplate:
        """Read the template where ``transformers`` looks for it; raises ``CheckpointError`` without one."""
        settings = Section.read(directory / TOKENIZER_CONFIG_FILE, optional=True)
        special = {name: text for name in _SPECIAL if (text := _content(settings.values.get(name)))}
        file = directory / TEMPLATE_FILE
        if file.exists():
            try:
                return cls(read_regular(file, _MOST_BYTES).decode(), file, special)
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{file}: not readable: {error}") from error
        for section in (Section.read(directory / TEMPLATE_JSON_FILE, optional=True), settings):
            if section.has(_KEY):
                return cls(section.string(_KEY), section.path, special)
        raise CheckpointError(
            f"{directory}: has no chat template, which prompts of this family are made by: neither"
            f" {TEMPLATE_FILE} nor {_KEY} in {TOKENIZER_CONFIG_FILE}"
        )

    def render(self, messages: Sequence[Mapping[str, Any]], *, generation: bool) -> str:
        """Return the text of a conversation.

        Raises ``ValueError`` with the complaint of a template that does not take it.
        """
        from jinja2 import TemplateError

        try:
            return self._template.render(
                **self.special,
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=generation,
            )
        except (TemplateError, TypeError, ArithmeticError, LookupError, OverflowError) as error:
            raise ValueError(str(error)) from error


class _Slot(Enum):
    """What a template leaves room for."""

    TEXT = "text"
    IMAGE = "image"


@dataclass(frozen=True, slots=True)
class _Frame:
    """What a template writes around an input of one shape: control tokens, fixed texts, and slots.

    ``before`` and ``behind`` are all that it writes around the text.
    """

    items: tuple[int | str | _Slot, ...]
    before: str
    behind: str


_Shape = tuple[str | None, ...]
"""The parts of a turn: what stands before the text, and None for an image."""


class Chat:
    """Makes segments of a user's turn behind an optional system message. Thread-safe.

    ``placeholder`` is the control token for which an image stands. With ``generation`` the prompt goes on
    to the beginning of an answer. What the tokenizer's post-processor adds stands around all of it, unless
    the template begins with BOS itself.
    """

    def __init__(self, path: Path, tokenizer: PlainTokenizer, *, placeholder: int, generation: bool) -> None:
        """Read the template; raises ``CheckpointError`` for one by which no text becomes a prompt."""
        self._template = ChatTemplate.read(path)
        self._tokenizer = tokenizer
        self._placeholder = placeholder
        self._generation = generation
        self._marks = marks_of(tokenizer)
        names = sorted(tokenizer.added, key=len, reverse=True)
        self._cuts = re.compile("|".join(map(re.escape, (*names, _TEXT))))
        self._framed = lru_cache(_SHAPES)(self._frame)
        try:
            frame = self._framed("", ("",))
            written = self._rendered("", ("",), _PROBE)
        except ValueError as error:
            raise CheckpointError(f"{self._template.path}: {error}") from error
        self._copies = written == frame.before + _PROBE + frame.behind

    def segments(
        self,
        system: str,
        parts: Sequence[str | ImagePlan],
        image: Callable[[ImagePlan], Sequence[Segment]],
        *,
        prefix: str = "",
        param: str,
    ) -> list[Segment]:
        """Return the prompt of images and at most one text, before which ``prefix`` stands.

        No ``system`` message is there for an empty one. ``image`` gives what stands for one placeholder.
        Raises ``InvalidInput`` naming ``param`` for what the template does not take.
        """
        shape: _Shape = tuple(prefix if isinstance(part, str) else None for part in parts)
        text = next((part for part in parts if isinstance(part, str)), "")
        frame, text = self._written(system, shape, text, param)
        images = iter([part for part in parts if isinstance(part, ImagePlan)])
        segments: list[Segment] = []
        for item in frame.items:
            if isinstance(item, int):
                segments.append(item)
            elif isinstance(item, str):
                segments.append(Fixed(item))
            elif item is _Slot.IMAGE:
                segments += image(next(images))
            else:
                before = segments.pop() if segments and isinstance(segments[-1], Fixed) else Fixed("")
                assert isinstance(before, Fixed)
                segments.append(Run(before.text, text))
        return segments

    def written(self, system: str, text: str, *, param: str) -> str:
        """Return a text that is all of a turn as the template writes it; raises as ``segments``."""
        return self._written(system, ("",), text, param)[1]

    def _written(self, system: str, shape: _Shape, text: str, param: str) -> tuple[_Frame, str]:
        """Return what stands around a text, and the text as the template writes it."""
        try:
            frame = self._framed(system, shape)
            if text and not self._copies:
                text = self._within(frame, self._rendered(system, shape, text))
        except ValueError as error:
            raise InvalidInput(f"{param}: the checkpoint's chat template: {error}", param=param) from error
        return frame, text

    def _frame(self, system: str, shape: _Shape) -> _Frame:
        """Raises ``ValueError`` for a shape that the template does not take or does not keep."""
        rendered = self._rendered(system, shape, _TEXT)
        items = self._items(rendered)
        images, texts = items.count(_Slot.IMAGE), items.count(_Slot.TEXT)
        if images != shape.count(None) or texts != len(shape) - images:
            raise ValueError(
                f"it writes {images} placeholders and {texts} texts for {shape.count(None)} images and"
                f" {len(shape) - shape.count(None)} texts"
            )
        follows = items[items.index(_Slot.TEXT) + 1 :] if texts else []
        if follows and isinstance(follows[0], str):
            raise ValueError(
                "it writes more behind the text without a control token between; this is not done"
            )
        if not self._begins_with_bos(rendered):
            items = [*self._marks.before, *items, *self._marks.behind]
        before, _, behind = rendered.partition(_TEXT)
        return _Frame(tuple(items), before, behind)

    def _items(self, rendered: str) -> list[int | str | _Slot]:
        items: list[int | str | _Slot] = []
        end = 0
        for cut in self._cuts.finditer(rendered):
            if cut.start() > end:
                items.append(rendered[end : cut.start()])
            end = cut.end()
            if cut.group() == _TEXT:
                items.append(_Slot.TEXT)
                continue
            token = self._tokenizer.id_of(cut.group())
            added = self._tokenizer.added[cut.group()]
            if added.get("lstrip") or added.get("rstrip"):
                raise ValueError(f"{cut.group()} takes the space beside it away; this is not done")
            items.append(_Slot.IMAGE if token == self._placeholder else token)
        return [*items, rendered[end:]] if end < len(rendered) else items

    def _begins_with_bos(self, rendered: str) -> bool:
        bos = self._template.special.get("bos_token")
        return bos is not None and rendered.startswith(bos)

    def _rendered(self, system: str, shape: _Shape, text: str) -> str:
        content = [
            {"type": "image"} if prefix is None else {"type": "text", "text": prefix + text}
            for prefix in shape
        ]
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if system:
            messages.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
        return self._template.render(messages, generation=self._generation)

    def _within(self, frame: _Frame, rendered: str) -> str:
        """What became of a text that the template changes."""
        if not rendered.startswith(frame.before) or not rendered.endswith(frame.behind):
            raise ValueError("what it writes around a text depends on the text; this is not done")
        return rendered[len(frame.before) : len(rendered) - len(frame.behind)]


def _compiled(source: str, path: Path) -> Template:
    """As ``transformers`` compiles it; raises ``CheckpointError``."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise CheckpointError(f"{path}: {_KEY} is no template: {error}") from error


def _raise(message: str) -> NoReturn:
    """What a template calls to refuse a conversation."""
    from jinja2 import TemplateError

    raise TemplateError(message)


def _content(token: Any) -> str | None:
    """The text of a special token, which an object may describe."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
