"""From a validated request to output rows: obtain images, build prompts, dispatch, account for tokens."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from tessera import tracing, wire
from tessera.errors import InvalidInput, TesseraError, UnsupportedOperation
from tessera.frontend.media import MediaLoader
from tessera.frontend.metrics import ModelMetrics
from tessera.frontend.request import EmbeddingsRequest, EmbedDtype, Input, ScoreRequest
from tessera.frontend.serving.dispatch import Answer, Embedder, indices_within, row_bounds
from tessera.frontend.serving.prompts import ImageReader, KnownMedia, Prompter, Visions
from tessera.frontend.settings import Limits
from tessera.frontend.widths import Widths
from tessera.models.base import Model, Output, OutputKind, Piece, Prompt, Role, RowKind, stage_outputs
from tessera.tasks import Deadline

T = TypeVar("T")

_EPSILON: Final = 1e-12
_PACKED: Final = (EmbedDtype.BINARY, EmbedDtype.UBINARY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of a whole request; cached ones are image tokens whose rows no encoder had to compute."""

    text_tokens: int
    image_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.text_tokens + self.image_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The inputs' rows in their order, float32 ``[rows, width]``; those of failed inputs are zeros.

    ``bounds``, int64 ``[inputs + 1]``, says which rows are an input's. Where the output is a vector, each
    has one, failed ones too: a unit vector, or as the model pooled it when the request asked for that.
    ``lengths`` are the inputs' tokens, 0 of what could not be read. ``image_pixels`` counts the pixels of all
    images as they were sent.
    """

    request_id: str
    rows: npt.NDArray[np.float32]
    bounds: npt.NDArray[np.int64]
    lengths: Sequence[int]
    errors: dict[int, TesseraError]
    usage: Usage
    image_pixels: int
    timings: wire.Timings


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """``values`` float32 ``[documents]``, in their order.

    Logits where ``kind`` is SCORE, else cosines (VECTOR) or sums of each query token's best dot product
    (TOKENS, MaxSim). Other fields as in ``Result``.
    """

    request_id: str
    values: npt.NDArray[np.float32]
    kind: OutputKind
    usage: Usage
    image_pixels: int
    timings: wire.Timings


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a request takes of workers: ``tokens``, ``units`` of the vision stage, and output rows.

    ``bounds``, int64 ``[inputs + 1]``, says which of the rows are an input's.
    """

    tokens: int
    units: int
    bounds: npt.NDArray[np.int64]

    @property
    def rows(self) -> int:
        return int(self.bounds[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A request for vectors whose images are read and whose prompts are built.

    ``good`` has the prompt and the images of each input that can be embedded, ``errors`` the error of each
    other, by index; ``lengths`` are as in ``Result``.
    """

    request: EmbeddingsRequest
    output: Output
    good: dict[int, tuple[Prompt, Visions]]
    errors: dict[int, TesseraError]
    lengths: Sequence[int]
    cost: Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreWork:
    """A request for scores whose images are read and whose prompts are built.

    The rows of its cost are those that workers send: none of a reranker's queries, and none of a token-vector
    model's documents.
    """

    request: ScoreRequest
    prompts: Sequence[Prompt]
    images: Sequence[Visions]
    cost: Cost


def check_width(own: int, dimensions: int | None, dtype: EmbedDtype, param: str = "dimensions") -> int:
    """The width of the vectors to send, checked before anything is computed; ``own`` is the model's.

    Raises ``InvalidInput``, naming ``param``, for more dimensions than there are, and for a packed type whose
    width is not a multiple of 8. Which widths a model was trained for is the caller's to check.
    """
    width = own if dimensions is None else dimensions
    if not 0 < width <= own:
        raise InvalidInput(f"{param}: expected 1 to {own}, the model's own width, found {width}", param=param)
    if dtype in _PACKED and width % 8:
        raise InvalidInput(
            f"{param}: {dtype.value} packs eight values to a byte, and {width} is not a multiple of 8",
            param=param,
        )
    return width


class Pipeline:
    """Answers one ``EmbeddingsRequest`` or one ``ScoreRequest``. Knows no client's form and no HTTP."""

    def __init__(
        self,
        model: Model,
        media: MediaLoader,
        embedder: Embedder,
        limits: Limits,
        metrics: ModelMetrics,
        known: KnownMedia | None = None,
        *,
        widths: Widths | None = None,
    ) -> None:
        self._model = model
        self.widths = widths or Widths.offered(model.dimensions, model.output.width, "")
        self._images = ImageReader(model, media, known)
        self._embedder = embedder
        self._limits = limits
        self._metrics = metrics
        self._outputs = {RowKind.OUTPUT: model.output, **stage_outputs(model)}
        self._prompter = Prompter(model, min(limits.max_tokens or model.max_tokens, model.max_tokens))

    @property
    def max_tokens(self) -> int:
        return self._prompter.max_tokens

    @property
    def output(self) -> Output:
        return self._model.output

    def output_of(self, request: EmbeddingsRequest) -> Output:
        """What its inputs become; raises ``UnsupportedOperation`` where the model has no such rows."""
        if (found := self._outputs.get(request.rows)) is None:
            raise UnsupportedOperation(
                f"family {self._model.family} gives no rows of kind {request.rows.value}"
            )
        return found

    async def pieces(
        self, texts: Sequence[tuple[str, str]], *, role: Role, instruction: str | None
    ) -> list[Sequence[Piece]]:
        """The tokens of each (text, param), as it would be embedded."""

        def cut() -> list[Sequence[Piece]]:
            return [
                self._model.pieces(text, role=role, instruction=instruction, param=param)
                for text, param in texts
            ]

        return await asyncio.to_thread(cut)

    def token_text(self, token: int) -> str:
        return self._model.token_text(token)

    async def prompts(
        self, request: EmbeddingsRequest, *, deadline: Deadline, client: str = ""
    ) -> tuple[list[Prompt | TesseraError], list[Visions | TesseraError]]:
        """Each input as tokens and as images, or its error; the first error is raised unless the
        request allows partial results."""
        self._check(request)
        visions = await self._media(
            request.inputs, deadline, allow_partial=request.allow_partial, client=client
        )
        with self._metrics.prompt_seconds.time(), tracing.span("prompt", {"tessera.inputs": len(visions)}):
            prompts = await self._prompter.build(request, visions)
        if not request.allow_partial:
            _raise_first(prompts)
        return prompts, visions

    async def _media(
        self, inputs: Sequence[Input], deadline: Deadline, *, allow_partial: bool, client: str
    ) -> list[Visions | TesseraError]:
        """Each input's images, or its error."""
        images = sum(len(entry.images) for entry in inputs)
        if not images:
            return [entry.malformed or () for entry in inputs]
        started = time.perf_counter()
        with tracing.span("media", {"tessera.images": images}):
            visions = await self._images.read(inputs, deadline, allow_partial=allow_partial, client=client)
        self._metrics.media_seconds.observe(time.perf_counter() - started)
        return visions

    async def prepare(self, request: EmbeddingsRequest, *, deadline: Deadline, client: str = "") -> Work:
        """Read the images and build the prompts; nothing is sent to a worker.

        ``client`` names the API key, empty where there are none. Raises the first input's error, unless the
        request allows partial results.
        """
        prompts, visions = await self.prompts(request, deadline=deadline, client=client)
        good: dict[int, tuple[Prompt, Visions]] = {}
        errors: dict[int, TesseraError] = {}
        for index, (prompt, images) in enumerate(zip(prompts, visions, strict=True)):
            if isinstance(prompt, TesseraError):
                errors[index] = prompt
            else:
                assert isinstance(images, tuple)
                good[index] = prompt, images
        output = self.output_of(request)
        lengths = [0 if isinstance(prompt, TesseraError) else len(prompt.tokens) for prompt in prompts]
        cost = Cost(
            tokens=sum(lengths),
            units=sum(vision.plan.units for _, images in good.values() for vision in images),
            bounds=row_bounds(output, lengths),
        )
        return Work(request=request, output=output, good=good, errors=errors, lengths=lengths, cost=cost)

    async def embed(self, work: Work, *, request_id: str, deadline: Deadline, client: str = "") -> Result:
        """The rows of what was prepared; raises as ``prepare``, and what workers raise."""
        request, output, good, cost = work.request, work.output, work.good, work.cost
        errors, count, rows = dict(work.errors), cost.rows, None
        cached, timings = 0, wire.Timings()
        if good:
            items = [_item(request.inputs[index], *made) for index, made in good.items()]
            with self._dispatching({"tessera.items": len(items)}, cost):
                answer = await self._embedder.embed(
                    items,
                    request_id=request_id,
                    priority=request.priority,
                    client=client,
                    deadline=deadline,
                    rows=request.rows,
                )
            order = list(good)
            errors |= {order[position]: error for position, error in answer.errors.items()}
            if errors and not request.allow_partial:
                raise errors[min(errors)]
            rows = answer.rows
            if request.rows is not RowKind.OUTPUT:
                pass
            elif not request.normalize:
                rows = rows * answer.norms[:, None]
            elif output.kind is OutputKind.VECTOR:
                rows = _unit(rows, output)
            if len(rows) != count:
                rows = _spread(rows, indices_within(cost.bounds, order), count)
            cached, timings = sum(answer.cached_tokens), answer.timings
        done = [made for index, made in good.items() if index not in errors]
        usage = Usage(
            text_tokens=sum(prompt.text_tokens for prompt, _ in done),
            image_tokens=sum(prompt.image_tokens for prompt, _ in done),
            cached_tokens=cached,
        )
        self._count(request.inputs, usage, count)
        for error in errors.values():
            self._metrics.count_input_error(error.code)
        return Result(
            request_id=request_id,
            rows=np.zeros((count, output.width), np.float32) if rows is None else rows,
            bounds=cost.bounds,
            lengths=work.lengths,
            errors=errors,
            usage=usage,
            image_pixels=sum(vision.pixels for _, images in done for vision in images),
            timings=timings,
        )

    async def prepare_scores(
        self, request: ScoreRequest, *, deadline: Deadline, client: str = ""
    ) -> ScoreWork:
        """As ``prepare``, all documents or none: raises the first input's error."""
        inputs = (*request.queries, *request.documents)
        self._check_images(inputs)
        visions = await self._media(inputs, deadline, allow_partial=False, client=client)
        with self._metrics.prompt_seconds.time(), tracing.span("prompt", {"tessera.inputs": len(visions)}):
            made = await (
                self._prompter.pairs(request, visions)
                if self._model.output.kind is OutputKind.SCORE
                else self._prompter.sides(request, visions)
            )
        prompts, images = _raise_first(made), _raise_first(visions)
        cost = Cost(
            # Of all pairs, or of queries and documents where each is embedded on its own.
            tokens=sum(len(prompt.tokens) for prompt in prompts),
            # An image counts once, in however many pairs it is.
            units=sum(vision.plan.units for found in images for vision in found),
            bounds=self._score_bounds(prompts, len(request.queries)),
        )
        return ScoreWork(request=request, prompts=prompts, images=images, cost=cost)

    async def score(
        self, work: ScoreWork, *, request_id: str, deadline: Deadline, client: str = ""
    ) -> Scores:
        """The score of each document that was prepared; raises the first input's error."""
        request, prompts, images = work.request, work.prompts, work.images
        kind, queries = self._model.output.kind, len(request.queries)
        inputs = (*request.queries, *request.documents)

        async def embed(items: Sequence[wire.Item], compared: Sequence[bytes] = ()) -> Answer:
            answer = await self._embedder.embed(
                items,
                request_id=request_id,
                priority=request.priority,
                client=client,
                deadline=deadline,
                queries=compared,
            )
            if answer.errors:
                raise answer.errors[min(answer.errors)]
            return answer

        attributes = {"tessera.pairs": len(request.documents), "tessera.items": len(prompts)}
        with self._dispatching(attributes, work.cost):
            if kind is OutputKind.SCORE:
                values, answers = await _logits(embed, request, prompts, images)
            elif kind is OutputKind.VECTOR:
                values, answers = await _cosines(embed, inputs, prompts, images, queries, self._model.output)
            else:
                values, answers = await _max_sims(embed, inputs, prompts, images, queries)
        usage = Usage(
            text_tokens=sum(prompt.text_tokens for prompt in prompts),
            image_tokens=sum(prompt.image_tokens for prompt in prompts),
            cached_tokens=sum(sum(answer.cached_tokens) for answer in answers),
        )
        self._count(inputs, usage, work.cost.rows)
        self._metrics.pairs.inc(len(request.documents))
        return Scores(
            request_id=request_id,
            values=values,
            kind=kind,
            usage=usage,
            image_pixels=sum(vision.pixels for found in images for vision in found),
            timings=functools.reduce(wire.Timings.merge, [answer.timings for answer in answers]),
        )

    @contextmanager
    def _dispatching(self, attributes: dict[str, int], cost: Cost) -> Iterator[None]:
        attributes |= {"tessera.tokens": cost.tokens, "tessera.output_rows": cost.rows}
        with self._metrics.dispatch_seconds.time(), tracing.span("dispatch", attributes):
            yield

    def _score_bounds(self, prompts: Sequence[Prompt], queries: int) -> npt.NDArray[np.int64]:
        """Which rows that workers send are those of each query and each document."""
        match self._model.output.kind:
            case OutputKind.SCORE:
                counts = [0] * queries + [1] * len(prompts)
            case OutputKind.VECTOR:
                counts = [1] * len(prompts)
            case OutputKind.TOKENS:
                counts = [len(prompt.tokens) for prompt in prompts[:queries]]
                counts += [0] * (len(prompts) - queries)
        return np.fromiter(accumulate(counts, initial=0), np.int64, len(counts) + 1)

    def _check(self, request: EmbeddingsRequest) -> None:
        param = request.dimensions_param
        if request.dimensions is not None and request.dimensions not in self.widths:
            raise InvalidInput(
                f"{param} {request.dimensions} is none of {self.widths} that this model offers", param=param
            )
        check_width(self._model.output.width, request.dimensions, request.dtype, param)
        self._check_images(request.inputs)

    def _check_images(self, inputs: Sequence[Input]) -> None:
        count, limit = 0, self._limits.request.images
        for entry in inputs:
            count += len(entry.images)
            if count > limit:
                raise InvalidInput(
                    f"{entry.param}: a request may hold {limit} images, and here are more", param=entry.param
                )

    def _count(self, inputs: Sequence[Input], usage: Usage, rows: int) -> None:
        metrics = self._metrics
        metrics.output_rows.inc(rows)
        with_images = sum(1 for entry in inputs if entry.images)
        metrics.inputs["text"].inc(len(inputs) - with_images)
        metrics.tokens["text"].inc(usage.text_tokens)
        if with_images:
            metrics.inputs["image"].inc(with_images)
            metrics.tokens["image"].inc(usage.image_tokens)
            metrics.tokens["cached"].inc(usage.cached_tokens)


_Embed = Callable[..., Awaitable[Answer]]
_Values = tuple[npt.NDArray[np.float32], list[Answer]]


async def _logits(
    embed: _Embed, request: ScoreRequest, prompts: Sequence[Prompt], images: Sequence[Visions]
) -> _Values:
    """A reranker's own scores, of prompts that are pairs."""
    queries = len(request.queries)
    found = [images[min(index, queries - 1)] + own for index, own in enumerate(images[queries:])]
    answer = await embed([_item(*made) for made in zip(request.documents, prompts, found, strict=True)])
    return answer.rows[:, 0], [answer]


async def _cosines(
    embed: _Embed,
    inputs: Sequence[Input],
    prompts: Sequence[Prompt],
    images: Sequence[Visions],
    queries: int,
    output: Output,
) -> _Values:
    answer = await embed([_item(*made) for made in zip(inputs, prompts, images, strict=True)])
    rows = _unit(answer.rows, output)
    return (rows[:queries] * rows[queries:]).sum(axis=1, dtype=np.float32), [answer]


async def _max_sims(
    embed: _Embed, inputs: Sequence[Input], prompts: Sequence[Prompt], images: Sequence[Visions], queries: int
) -> _Values:
    """The queries' rows come here once, and go to the workers, which compare documents' rows with them."""
    items = [_item(*made) for made in zip(inputs, prompts, images, strict=True)]
    asked = await embed(items[:queries])
    compared = [asked.rows[first:last].tobytes() for first, last in pairwise(asked.bounds.tolist())]
    documents = [
        msgspec.structs.replace(item, query=min(index, queries - 1))
        for index, item in enumerate(items[queries:])
    ]
    answer = await embed(documents, compared)
    return answer.rows[:, 0], [asked, answer]


def _raise_first(made: Sequence[T | TesseraError]) -> list[T]:
    """All of them, where none is an error."""
    good: list[T] = []
    for one in made:
        if isinstance(one, TesseraError):
            raise one
        good.append(one)
    return good


def _unit(rows: npt.NDArray[np.float32], output: Output) -> npt.NDArray[np.float32]:
    """Vectors as they came from workers, scaled to unit length where they are not yet."""
    if output.unit_length:
        return rows
    # In float64: the squares of what is beyond 1.8e19 overflow float32.
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    unit: npt.NDArray[np.float32] = (rows / np.maximum(norms, _EPSILON)[:, None]).astype(np.float32)
    return unit


def _spread(
    rows: npt.NDArray[np.float32], places: npt.NDArray[np.int64], count: int
) -> npt.NDArray[np.float32]:
    """Rows at their places among ``count``, with zeros between."""
    spread = np.zeros((count, rows.shape[1]), np.float32)
    spread[places] = rows
    return spread


def _item(entry: Input, prompt: Prompt, visions: Visions) -> wire.Item:
    return wire.Item(
        tokens=prompt.tokens.astype("<i4", copy=False).tobytes(),
        images=tuple(vision.payload for vision in visions),
        param=entry.param,
    )
