"""The prompts of a request: each input's tokens, with placeholders for its images."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from tessera.errors import InvalidInput, TesseraError
from tessera.frontend.request import EmbeddingsRequest, Image, Input, ScoreRequest
from tessera.frontend.serving.dispatch import Call
from tessera.frontend.serving.images import Visions
from tessera.frontend.serving.long_texts import MOST_DOCUMENTS, LongTexts, beside_the_loop
from tessera.models.base import (
    Content,
    InputTask,
    Model,
    PairLimits,
    Pairs,
    Piece,
    Prompt,
    Role,
    Truncate,
    truncation_of,
)
from tessera.models.declared import declared_of, named_prompt
from tessera.turns import Threads

# Shorter texts are tokenised on the event loop: handing them to a thread costs more than the work.
_INLINE_CHARACTERS = 4096
# Of the inputs in one turn on a thread: 0.05 to 0.3 s. Whoever leaves, or is late, ends behind one of them.
_TURN_CHARACTERS = 1 << 16
# Of one input on a thread, which nobody can end: 0.3 to 1 s. 32,768 tokens of English are 160,000.
_THREAD_CHARACTERS = 1 << 18
# Of which a key has 2.
_MOST_THREADS = 8


class _Work(NamedTuple):
    """What is tokenised at a time: an input, or documents with their query, whose tokens are made once.

    ``errors`` has the error of each prompt that ``task`` does not give, in its place; empty: it gives all.
    """

    task: Callable[[], InputTask | Pairs] | None
    size: int
    errors: Sequence[TesseraError | None] = ()

    def prompts(self, model: Model) -> list[Prompt | TesseraError]:
        return self.completed([] if self.task is None else self.task().prompts(model))

    def completed(self, made: list[Prompt | TesseraError]) -> list[Prompt | TesseraError]:
        """Return what the task gave, with the errors in their places."""
        left = iter(made)
        return [next(left) if error is None else error for error in self.errors] if self.errors else made


_Entry = tuple[Input, Visions | TesseraError]
"""An input, and its images or why they cannot be read."""


def _pair_works(query: _Entry, documents: Sequence[_Entry], limits: PairLimits) -> Iterator[_Work]:
    """Yield work of few documents each; none has more than would be worth another look at the query."""
    most = max(_TURN_CHARACTERS, query[0].size)
    first = size = 0
    for place, (entry, _) in enumerate(documents):
        if place > first and (size + entry.size > most or place - first == MOST_DOCUMENTS):
            yield _pair_work(query, documents[first:place], limits)
            first, size = place, 0
        size += entry.size
    yield _pair_work(query, documents[first:], limits)


def _pair_work(query: _Entry, documents: Sequence[_Entry], limits: PairLimits) -> _Work:
    asked, images = query
    size = asked.size + sum(entry.size for entry, _ in documents)
    if isinstance(images, TesseraError):
        return _Work(None, size, [images] * len(documents))
    good = [(entry, plans) for entry, plans in documents if not isinstance(plans, TesseraError)]

    def task() -> Pairs:
        return Pairs(
            query=_content(asked, images),
            documents=[_content(*document) for document in good],
            limits=limits,
            param=asked.param,
            params=[entry.param for entry, _ in good],
        )

    return _Work(task, size, [plans if isinstance(plans, TesseraError) else None for _, plans in documents])


class _TextWork(NamedTuple):
    """A text whose tokens are wanted one by one."""

    text: str
    param: str

    @property
    def size(self) -> int:
        return len(self.text)


T = TypeVar("T")
W = TypeVar("W", _Work, _TextWork)


class Prompter:
    """Tokenises the inputs of a request; ``max_tokens`` bounds each of them.

    ``max_embed_tokens`` bounds a text that is embedded in runs, where it is more.

    Long ones wait for threads in turns by key, and the longest for processes, where there are any. Raises
    ``DeadlineExceeded``.
    """

    def __init__(
        self, model: Model, max_tokens: int, long_texts: LongTexts | None = None, *, max_embed_tokens: int = 0
    ) -> None:
        self._model = model
        self._max_embed_tokens = max_embed_tokens
        self._declared = declared_of(model)
        self.long_texts = long_texts
        self.max_tokens = max_tokens
        self.threads = Threads(beside_the_loop(_MOST_THREADS), "tokenise")

    async def build(
        self, request: EmbeddingsRequest, visions: Sequence[Visions | TesseraError], call: Call
    ) -> list[Prompt | TesseraError]:
        """Return each input's prompt, or its error: its images' own, or why it cannot be a prompt."""
        truncate = truncation_of(self._model, request.truncate)
        most = min(request.max_tokens or self.max_tokens, self.max_tokens)
        in_runs = self._max_embed_tokens and request.truncate is Truncate.NONE and not request.outputs
        works = [
            self._input(entry, images, self._most(entry) if in_runs else most, truncate)
            for entry, images in zip(request.inputs, visions, strict=True)
        ]
        return await self._run(works, call)

    async def sides(
        self, request: ScoreRequest, visions: Sequence[Visions | TesseraError], call: Call
    ) -> list[Prompt | TesseraError]:
        """Return the prompt of each query, then of each document, each on its own; or its error."""
        bound = min(request.max_tokens or self.max_tokens, self.max_tokens)
        works: list[_Work] = []
        images = iter(visions)
        for side, own in (
            (request.queries, request.max_query_tokens),
            (request.documents, request.max_document_tokens),
        ):
            cut = own is not None and own < bound
            asked = Truncate.END if cut else request.truncate
            limits = own if own is not None and cut else bound, truncation_of(self._model, asked)
            works += [self._input(entry, next(images), *limits) for entry in side]
        return await self._run(works, call)

    async def pairs(
        self, request: ScoreRequest, visions: Sequence[Visions | TesseraError], call: Call
    ) -> list[Prompt | TesseraError]:
        """Return the prompt of each document with its query, or its error."""
        queries = request.queries
        limits = PairLimits(
            tokens=min(request.max_tokens or self.max_tokens, self.max_tokens),
            query=request.max_query_tokens,
            document=request.max_document_tokens,
            truncate=truncation_of(self._model, request.truncate),
        )
        sides = list(zip(queries, visions, strict=False))
        documents = list(zip(request.documents, visions[len(queries) :], strict=True))
        groups = [documents] if len(queries) == 1 else [[document] for document in documents]
        asked = zip(sides, groups, strict=True)
        works = [work for query, group in asked for work in _pair_works(query, group, limits)]
        return await self._run(works, call)

    async def pieces(
        self,
        texts: Sequence[tuple[str, str]],
        call: Call,
        write: Callable[[Sequence[Piece]], T],
        *,
        role: Role,
        instruction: str | None,
    ) -> AsyncIterator[Sequence[T]]:
        """Yield what ``write`` makes, on a thread, of the tokens of each (text, param), some at a time.

        Raises ``InvalidInput`` for a text that is too long for a thread.
        """
        for text, param in texts:
            if len(text) > _THREAD_CHARACTERS:
                raise InvalidInput.at(
                    param, f"expected at most {_THREAD_CHARACTERS} characters, found {len(text)}"
                )

        def cut(turn: Sequence[_TextWork]) -> list[T]:
            pieces = partial(self._model.pieces, role=role, instruction=instruction)
            return [write(pieces(text, param=param)) for text, param in turn]

        place = self.threads.turns.place()
        async with call.deadline.bound():
            for size, turn in _turns([_TextWork(*text) for text in texts]):
                yield await self.threads.run(partial(cut, turn), call.client, size=size, place=place)

    async def _run(self, works: Sequence[_Work], call: Call) -> list[Prompt | TesseraError]:
        if sum([work.size for work in works]) <= _INLINE_CHARACTERS:
            return _prompts(works, self._model)
        async with call.deadline.bound():
            return [prompt async for prompt in self._aside(works, call)]

    async def _aside(self, works: Sequence[_Work], call: Call) -> AsyncIterator[Prompt | TesseraError]:
        place = self.threads.turns.place()
        for size, turn in _turns(works):
            task = turn[0].task
            if self.long_texts is not None and size > _THREAD_CHARACTERS and task is not None:
                # By a process that ends with the caller.
                prompts = turn[0].completed(await self.long_texts.prompts(task(), call, size=size))
            else:
                build = partial(_prompts, turn, self._model)
                prompts = await self.threads.run(
                    build, call.client, size=size, priority=call.priority, place=place
                )
            for prompt in prompts:
                yield prompt

    def _most(self, entry: Input) -> int:
        """Return how many tokens an input may have that is embedded in runs if it has more than others."""
        return self.max_tokens if entry.images else max(self.max_tokens, self._max_embed_tokens)

    def _input(
        self, entry: Input, visions: Visions | TesseraError, max_tokens: int, truncate: Truncate
    ) -> _Work:
        try:
            prompt = None if entry.prompt_name is None else self._named(entry, entry.prompt_name)
        except InvalidInput as error:
            visions = error.kept()
        if isinstance(visions, TesseraError):
            return _Work(None, entry.size, [visions])
        content = partial(_content, entry, visions, prompt)
        return _Work(lambda: InputTask(content(), max_tokens, truncate, entry.param), entry.size)

    def _named(self, entry: Input, name: str) -> str | None:
        """Return the prompt of an input that names one; raises ``InvalidInput``."""
        prompt = named_prompt(self._declared, name)
        if prompt is not None and entry.instruction is not None:
            raise InvalidInput.at("prompt_name", "contradicts instruction")
        return prompt


def _turns(works: Sequence[W]) -> Iterator[tuple[int, Sequence[W]]]:
    """Yield what is done in one turn, with its size; what is longer than a turn is alone in it."""
    first = size = 0
    for place, work in enumerate(works):
        if place > first and size + work.size > _TURN_CHARACTERS:
            yield size, works[first:place]
            first, size = place, 0
        size += work.size
    yield size, works[first:]


def _prompts(works: Sequence[_Work], model: Model) -> list[Prompt | TesseraError]:
    return [prompt for work in works for prompt in work.prompts(model)]


def _content(entry: Input, visions: Visions, prompt: str | None = None) -> Content:
    plans = iter(visions)
    return Content(
        parts=tuple([next(plans).payload.plan if isinstance(part, Image) else part for part in entry.parts]),
        role=entry.role,
        instruction=entry.instruction,
        prompt=prompt,
        chunked=entry.chunked,
    )
