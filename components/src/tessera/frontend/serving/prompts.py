"""The prompts of a request: each input's tokens, with placeholders for its images."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from tessera.errors import InvalidInput, TesseraError
from tessera.frontend.request import EmbeddingsRequest, Image, Input, ScoreRequest
from tessera.frontend.serving.dispatch import Call
from tessera.frontend.serving.images import Visions
from tessera.frontend.serving.long_texts import MOST_DOCUMENTS, InputTask, LongTexts, PairsTask
from tessera.models.base import Content, Model, PairLimits, Piece, Prompt, Role, Truncate, truncation_of
from tessera.models.declared import declared_of, named_prompt
from tessera.turns import Threads

# Shorter texts are tokenised on the event loop: handing them to a thread costs more than the work.
_INLINE_CHARACTERS = 4096
# Of the inputs in one turn on a thread: 0.05 to 0.3 s. Whoever leaves, or is late, ends behind one of them.
_TURN_CHARACTERS = 1 << 16
# Of one input on a thread, which nobody can end: 0.3 to 1 s. 32,768 tokens of English are 160,000.
_THREAD_CHARACTERS = 1 << 18


def _threads() -> int:
    """One for each processor but the event loop's, at least 2 and at most 8, of which a key has 2.

    When hundreds of requests come at once, more threads would take time from the loop.
    """
    return min(8, max(2, len(os.sched_getaffinity(0)) - 1))


class _InputWork(NamedTuple):
    """The prompt of one input, or its error."""

    entry: Input
    visions: Visions | TesseraError
    max_tokens: int
    truncate: Truncate
    prompt: str | None = None

    @property
    def size(self) -> int:
        return self.entry.size

    def prompts(self, model: Model) -> list[Prompt | TesseraError]:
        entry, visions, max_tokens, truncate, prompt = self
        if isinstance(visions, TesseraError):
            return [visions]
        content = _content(entry, visions, prompt)
        try:
            return [model.prompt(content, max_tokens=max_tokens, truncate=truncate, param=entry.param)]
        except TesseraError as error:
            return [error]

    async def aside(self, processes: LongTexts, call: Call) -> list[Prompt | TesseraError]:
        """Return what ``prompts`` returns, by a process that ends with the caller."""
        if isinstance(self.visions, TesseraError):
            return [self.visions]
        content, param = _content(self.entry, self.visions, self.prompt), self.entry.param
        task = InputTask(content, self.max_tokens, self.truncate, param)
        return await processes.prompts(task, call, size=self.size)


class _PairsWork(NamedTuple):
    """The prompts of documents with their query, whose tokens are made once, or their errors."""

    query: Input
    images: Visions | TesseraError
    documents: Sequence[tuple[Input, Visions | TesseraError]]
    limits: PairLimits

    @property
    def size(self) -> int:
        return self.query.size + sum(entry.size for entry, _ in self.documents)

    def prompts(self, model: Model) -> list[Prompt | TesseraError]:
        if isinstance(self.images, TesseraError):
            return [self.images] * len(self.documents)
        return self._with_errors(self.task(self.images).prompts(model))

    def task(self, images: Visions) -> PairsTask:
        good = [(entry, plans) for entry, plans in self.documents if not isinstance(plans, TesseraError)]
        return PairsTask(
            query=_content(self.query, images),
            documents=[_content(*document) for document in good],
            limits=self.limits,
            param=self.query.param,
            params=[entry.param for entry, _ in good],
        )

    async def aside(self, processes: LongTexts, call: Call) -> list[Prompt | TesseraError]:
        """Return what ``prompts`` returns, by a process that ends with the caller."""
        if isinstance(self.images, TesseraError):
            return [self.images] * len(self.documents)
        return self._with_errors(await processes.prompts(self.task(self.images), call, size=self.size))

    def _with_errors(self, good: Sequence[Prompt | TesseraError]) -> list[Prompt | TesseraError]:
        prompts = iter(good)
        return [plans if isinstance(plans, TesseraError) else next(prompts) for _, plans in self.documents]

    def parts(self) -> Iterator[_PairsWork]:
        """Yield work of few documents each; none has more of them than would be worth another look at the
        query."""
        most = max(_TURN_CHARACTERS, self.query.size)
        first = size = 0
        for place, (entry, _) in enumerate(self.documents):
            if place > first and (size + entry.size > most or place - first == MOST_DOCUMENTS):
                yield self._replace(documents=self.documents[first:place])
                first, size = place, 0
            size += entry.size
        yield self._replace(documents=self.documents[first:])


_Work = _InputWork | _PairsWork


class _TextWork(NamedTuple):
    """A text whose tokens are wanted one by one."""

    text: str
    param: str

    @property
    def size(self) -> int:
        return len(self.text)


T = TypeVar("T")
W = TypeVar("W", _InputWork | _PairsWork, _TextWork)


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
        self.threads = Threads(_threads(), "tokenise")

    async def build(
        self, request: EmbeddingsRequest, visions: Sequence[Visions | TesseraError], call: Call
    ) -> list[Prompt | TesseraError]:
        """Return each input's prompt, or its error: its images' own, or why it cannot be a prompt."""
        truncate = truncation_of(self._model, request.truncate)
        limits = min(request.max_tokens or self.max_tokens, self.max_tokens), truncate
        pairs = zip(request.inputs, visions, strict=True)
        works = [_InputWork(*pair, *limits) for pair in pairs]
        if self._max_embed_tokens and request.truncate is Truncate.NONE and not request.outputs:
            works = [work._replace(max_tokens=self._most(work.entry)) for work in works]
        if any(entry.prompt_name is not None for entry in request.inputs):
            works = [work if work.entry.prompt_name is None else self._named(work) for work in works]
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
            works += [_InputWork(entry, next(images), *limits) for entry in side]
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
        works = (
            _PairsWork(query, images, group, limits)
            for (query, images), group in zip(sides, groups, strict=True)
        )
        return await self._run([part for work in works for part in work.parts()], call)

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
            if self.long_texts is not None and size > _THREAD_CHARACTERS:
                prompts = await turn[0].aside(self.long_texts, call)
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

    def _named(self, work: _InputWork) -> _InputWork:
        """Return an input with the prompt that it names, or with the error of that name."""
        name = work.entry.prompt_name
        assert name is not None
        try:
            prompt = named_prompt(self._declared, name)
        except InvalidInput as error:
            return work._replace(visions=error)
        if prompt is not None and work.entry.instruction is not None:
            contradiction = InvalidInput.at("prompt_name", "contradicts instruction")
            return work._replace(visions=contradiction)
        return work._replace(prompt=prompt)


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
