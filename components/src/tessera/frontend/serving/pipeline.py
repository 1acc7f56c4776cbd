"""From a validated request to output rows: obtain images, build prompts, dispatch, account for tokens."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from tessera import tracing, wire
from tessera.errors import InvalidInput, TesseraError
from tessera.frontend.media import MediaLoader
from tessera.frontend.metrics import ModelMetrics
from tessera.frontend.request import EmbeddingsRequest, EmbedDtype, Input, ScoreRequest
from tessera.frontend.serving.dispatch import NO_SALT, Answer, Call, Embedder, Salt
from tessera.frontend.serving.images import ImageReader, KnownMedia, Visions
from tessera.frontend.serving.long_texts import LongTexts
from tessera.frontend.serving.prompts import Prompter
from tessera.frontend.serving.runs import Runs
from tessera.frontend.settings import Limits
from tessera.frontend.widths import Widths
from tessera.models.base import (
    CHUNKS,
    Model,
    Output,
    OutputKind,
    Outputs,
    Prompt,
    ScoreActivation,
)
from tessera.rows import Rows

T = TypeVar("T")

_EPSILON: Final = 1e-12
_PACKED: Final = (EmbedDtype.BINARY, EmbedDtype.UBINARY)


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a whole request; cached ones are image tokens whose rows no encoder had to compute."""

    text_tokens: int
    image_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.text_tokens + self.image_tokens


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs' rows of each output by its name, the default output first, and what went wrong.

    The rows of failed inputs are zeros. Where the output is a vector, each input has one row, failed ones
    too: a unit vector, or as the model pooled it when the request asked for that. ``lengths`` are the inputs'
    tokens, 0 of what could not be read. ``image_pixels`` counts the pixels of all images as they were sent.
    """

    request_id: str
    outputs: Mapping[str, Rows]
    lengths: Sequence[int]
    errors: dict[int, TesseraError]
    usage: Usage
    image_pixels: int
    timings: wire.Timings

    @property
    def rows(self) -> Rows:
        """The default output's."""
        return next(iter(self.outputs.values()))


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """``values`` float32 ``[documents]``, in their order.

    Logits where ``kind`` is SCORE, else cosines (VECTOR) or sums of each query token's best dot product
    (TOKENS, MaxSim). ``activation`` is of logits. Other fields as in ``Result``.
    """

    request_id: str
    values: npt.NDArray[np.float32]
    kind: OutputKind
    activation: ScoreActivation = "sigmoid"
    usage: Usage
    image_pixels: int
    timings: wire.Timings


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What a request takes of workers: ``tokens``, ``units`` of the vision stage, and output rows.

    ``bounds``, int64 ``[inputs + 1]``, says of each output which of its rows are an input's.
    """

    tokens: int
    units: int
    bounds: tuple[npt.NDArray[np.int64], ...]

    @property
    def rows(self) -> int:
        return sum([int(ends[-1]) for ends in self.bounds])


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """A request for vectors whose images are read and whose prompts are built.

    ``good`` has the prompt and the images of each input that can be embedded, ``errors`` the error of each
    other, by index; ``lengths`` are as in ``Result``.
    """

    request: EmbeddingsRequest
    outputs: tuple[Output, ...]
    good: dict[int, tuple[Prompt, Visions]]
    errors: dict[int, TesseraError]
    lengths: Sequence[int]
    cost: Cost


class ScoreWork(msgspec.Struct, frozen=True, kw_only=True):
    """A request for scores whose images are read and whose prompts are built.

    The rows of its cost are those that workers send: none of a reranker's queries, and none of a token-vector
    model's documents.
    """

    request: ScoreRequest
    prompts: Sequence[Prompt]
    images: Sequence[Visions]
    cost: Cost


class Pipeline:
    """Answers one ``EmbeddingsRequest`` or one ``ScoreRequest``. Knows no client's form and no HTTP.

    ``widths`` are those that a vector may be cut to, ``max_tokens`` is the longest input, and a text of up to
    ``max_embed_tokens`` is embedded in runs. ``long_texts`` makes the prompts that threads would be at for
    seconds.
    """

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
        salt: Salt = NO_SALT,
        long_texts: LongTexts | None = None,
        max_embed_tokens: int = 0,
    ) -> None:
        self._model = model
        self._salt = salt
        self._long_texts = long_texts
        self.widths = widths or Widths.offered(model.dimensions, model.output.width, "")
        self.max_tokens = min(limits.max_tokens or model.max_tokens, model.max_tokens)
        self._images = ImageReader(model, media, known)
        self._most_images = limits.request.images
        self._embedder = embedder
        self._metrics = metrics
        self._outputs = Outputs.of_model(model)
        self._rows = {name: metrics.rows_of(name) for name in self._outputs.by_name}
        self._in_runs = max_embed_tokens > self.max_tokens
        self.prompter = Prompter(model, self.max_tokens, long_texts, max_embed_tokens=max_embed_tokens)

    async def close(self) -> None:
        """End what it has started; no request may be in progress."""
        if self._long_texts is not None:
            await self._long_texts.close()

    async def prepare(self, request: EmbeddingsRequest, call: Call) -> Work:
        """Read the images and build the prompts; nothing is sent to a worker.

        Raises the first input's error, unless the request allows partial results.
        """
        if request.dimensions is not None or request.dtype in _PACKED:
            self._check_width(request)
        visions = await self._read(request.inputs, call, allow_partial=request.allow_partial)
        with self._metrics.prompt_seconds.time(), tracing.span("prompt", {"tessera.inputs": len(visions)}):
            prompts = await self.prompter.build(request, visions, call)
        good: dict[int, tuple[Prompt, Visions]] = {}
        errors: dict[int, TesseraError] = {}
        for index, (prompt, images) in enumerate(zip(prompts, visions, strict=True)):
            if isinstance(prompt, TesseraError):
                errors[index] = prompt
            else:
                assert isinstance(images, tuple)
                good[index] = prompt, images
        if errors and not request.allow_partial:
            raise errors[min(errors)]
        outputs = self._outputs.of(request.outputs)
        lengths = [0 if isinstance(prompt, TesseraError) else len(prompt.tokens) for prompt in prompts]
        sizes = _chunk_counts(prompts) if request.outputs == (CHUNKS,) else lengths
        cost = Cost(
            tokens=sum(lengths),
            units=sum([vision.payload.plan.units for _, images in good.values() for vision in images]),
            bounds=tuple([output.bounds(sizes) for output in outputs]),
        )
        return Work(request=request, outputs=outputs, good=good, errors=errors, lengths=lengths, cost=cost)

    async def embed(self, work: Work, call: Call) -> Result:
        """Return the rows of what was prepared; raises as ``prepare``, and what workers raise."""
        request, good, errors = work.request, work.good, dict(work.errors)
        if not good:
            answer = Answer.empty((), *work.outputs)
        else:
            items = [_item(request.inputs[index], *parts) for index, parts in good.items()]
            call = msgspec.structs.replace(call, outputs=request.outputs) if request.outputs else call
            with self._dispatching({"tessera.items": len(items)}, work.cost):
                embed = partial(self._embed_in_runs, request) if self._in_runs else self._embedder.embed
                answer = await embed(items, call)
            order = list(good)
            errors |= {order[position]: error for position, error in answer.errors.items()}
            if errors and not request.allow_partial:
                raise errors[min(errors)]
        outputs: dict[str, Rows] = {}
        for output, rows, bounds in zip(work.outputs, answer.rows.each(), work.cost.bounds, strict=True):
            outputs[output.name] = self._finished(rows, bounds, output, work)
            self._rows[output.name].inc(int(bounds[-1]))
        done = [parts for index, parts in good.items() if index not in errors]
        for error in errors.values():
            self._metrics.input_errors(error.code).inc()
        return Result(
            request_id=call.request_id,
            outputs=outputs,
            lengths=work.lengths,
            errors=errors,
            usage=self._account(request.inputs, [prompt for prompt, _ in done], [answer]),
            image_pixels=sum([vision.pixels for _, images in done for vision in images]),
            timings=answer.timings,
        )

    async def _embed_in_runs(
        self, request: EmbeddingsRequest, items: Sequence[wire.Item], call: Call
    ) -> Answer:
        """Embed items of which some may be longer than the model reads."""
        if all(item.token_count <= self.max_tokens for item in items):
            return await self._embedder.embed(items, call)
        runs = Runs.of(items, self.max_tokens)
        answer = await self._embedder.embed(runs.items, call)
        vectors = _scaled(answer.rows, self._model.output, normalize=request.normalize).values
        return runs.joined(answer, vectors, normalize=request.normalize)

    def _finished(self, rows: Rows, bounds: npt.NDArray[np.int64], output: Output, work: Work) -> Rows:
        """Return the rows of one output as the request wants them, those that hold something."""
        normalize = work.request.normalize
        if output.kind is not OutputKind.SPARSE and not (normalize and output.unit_length):
            rows = _scaled(rows, output, normalize=normalize)
        if work.errors:
            rows = rows.spread(list(work.good), bounds)
        return rows if rows.indices is None else rows.held()

    async def prepare_scores(self, request: ScoreRequest, call: Call) -> ScoreWork:
        """As ``prepare``, all documents or none: raises the first input's error."""
        visions = await self._read((*request.queries, *request.documents), call)
        pairs = self._model.output.kind is OutputKind.SCORE
        with self._metrics.prompt_seconds.time(), tracing.span("prompt", {"tessera.inputs": len(visions)}):
            built = await (self.prompter.pairs if pairs else self.prompter.sides)(request, visions, call)
        prompts: list[Prompt] = []
        for prompt in built:
            if isinstance(prompt, TesseraError):
                raise prompt
            prompts.append(prompt)
        # A query or a document whose images could not be read has their error in place of its prompt.
        images = [vision for vision in visions if isinstance(vision, tuple)]
        cost = Cost(
            # Of all pairs, or of queries and documents where each is embedded on its own.
            tokens=sum([len(prompt.tokens) for prompt in prompts]),
            # An image counts once, in however many pairs it is.
            units=sum([vision.payload.plan.units for of_input in images for vision in of_input]),
            bounds=(self._score_bounds(prompts, len(request.queries)),),
        )
        return ScoreWork(request=request, prompts=prompts, images=images, cost=cost)

    async def score(self, work: ScoreWork, call: Call) -> Scores:
        """Return the score of each document that was prepared; raises the first input's error."""
        request, prompts, images = work.request, work.prompts, work.images
        kind, queries = self._model.output.kind, len(request.queries)
        inputs = (*request.queries, *request.documents)

        async def embed(items: Sequence[wire.Item], compared: Sequence[bytes] = ()) -> Answer:
            answer = await self._embedder.embed(items, msgspec.structs.replace(call, queries=compared))
            if answer.errors:
                raise answer.errors[min(answer.errors)]
            return answer

        entries = inputs
        if kind is OutputKind.SCORE:
            # Prompts are of pairs, each with its query's images before its own.
            pairs = enumerate(images[queries:])
            entries, images = request.documents, [images[min(at, queries - 1)] + own for at, own in pairs]
        items = [_item(*parts) for parts in zip(entries, prompts, images, strict=True)]
        attributes = {"tessera.pairs": len(request.documents), "tessera.items": len(prompts)}
        with self._dispatching(attributes, work.cost):
            if kind is OutputKind.TOKENS:
                # The queries' rows come here once, and go to the workers, which compare documents' with them.
                of_queries = await embed(items[:queries])
                compared = [rows.held().values.tobytes() for rows in of_queries.rows]
                documents = [
                    msgspec.structs.replace(item, query=min(index, queries - 1))
                    for index, item in enumerate(items[queries:])
                ]
                answers = [of_queries, await embed(documents, compared)]
            else:
                answers = [await embed(items)]
        values = answers[-1].rows.values[:, 0]
        if kind is OutputKind.VECTOR:
            rows = _scaled(answers[0].rows, self._model.output, normalize=True).values
            values = (rows[:queries] * rows[queries:]).sum(axis=1, dtype=np.float32)
        self._metrics.pairs.inc(len(request.documents))
        self._rows[self._model.output.name].inc(work.cost.rows)
        return Scores(
            request_id=call.request_id,
            values=values,
            kind=kind,
            activation=self._model.output.activation,
            usage=self._account(inputs, prompts, answers),
            image_pixels=sum([vision.pixels for of_input in work.images for vision in of_input]),
            timings=functools.reduce(wire.Timings.merge, [answer.timings for answer in answers]),
        )

    async def _read(
        self, inputs: Sequence[Input], call: Call, *, allow_partial: bool = False
    ) -> list[Visions | TesseraError]:
        """Return each input's images, or its error; raises ``InvalidInput`` for too many in a request."""
        images = sum([len(entry.images) for entry in inputs])
        if not images:
            return [entry.malformed or () for entry in inputs]
        if images > self._most_images:
            _refuse_images(inputs, self._most_images)
        started = time.perf_counter()
        with tracing.span("media", {"tessera.images": images}):
            visions = await self._images.read(inputs, call, self._salt(call), allow_partial=allow_partial)
        self._metrics.media_seconds.observe(time.perf_counter() - started)
        return visions

    @contextmanager
    def _dispatching(self, attributes: dict[str, int], cost: Cost) -> Iterator[None]:
        attributes |= {"tessera.tokens": cost.tokens, "tessera.output_rows": cost.rows}
        with self._metrics.dispatch_seconds.time(), tracing.span("dispatch", attributes):
            yield

    def _score_bounds(self, prompts: Sequence[Prompt], queries: int) -> npt.NDArray[np.int64]:
        """Return which rows that workers send are those of each query and each document."""
        match self._model.output.kind:
            case OutputKind.SCORE:
                counts = [0] * queries + [1] * len(prompts)
            case OutputKind.VECTOR:
                counts = [1] * len(prompts)
            case OutputKind.TOKENS:
                counts = [len(prompt.tokens) for prompt in prompts[:queries]]
                counts += [0] * (len(prompts) - queries)
        return np.fromiter(accumulate(counts, initial=0), np.int64, len(counts) + 1)

    def _check_width(self, request: EmbeddingsRequest) -> None:
        """Raise ``InvalidInput`` for a width that the model does not offer, or that cannot be packed."""
        param, width = request.dimensions_param, request.dimensions
        if width is None:
            width = self._model.output.width
        elif width not in self.widths:
            raise InvalidInput(f"{param} {width}: this model offers {self.widths}", param=param)
        if request.dtype in _PACKED and width % 8:
            kind = request.dtype.value
            raise InvalidInput.at(
                param, f"{kind} packs eight values to a byte, and {width} is not a multiple of 8"
            )

    def _account(
        self, inputs: Sequence[Input], prompts: Sequence[Prompt], answers: Sequence[Answer]
    ) -> Usage:
        """Return what a request used, and count it."""
        image_tokens = sum([prompt.image_tokens for prompt in prompts])
        usage = Usage(
            text_tokens=sum([len(prompt.tokens) for prompt in prompts]) - image_tokens,
            image_tokens=image_tokens,
            cached_tokens=sum([sum(answer.cached_tokens) for answer in answers]),
        )
        metrics = self._metrics
        with_images = sum([1 for entry in inputs if entry.images])
        metrics.inputs["text"].inc(len(inputs) - with_images)
        metrics.tokens["text"].inc(usage.text_tokens)
        if with_images:
            metrics.inputs["image"].inc(with_images)
            metrics.tokens["image"].inc(usage.image_tokens)
            metrics.tokens["cached"].inc(usage.cached_tokens)
        return usage


def _refuse_images(inputs: Sequence[Input], limit: int) -> None:
    """Raise ``InvalidInput`` naming the first input over the limit of images in a request."""
    for entry, count in zip(inputs, accumulate(len(entry.images) for entry in inputs), strict=True):
        if count > limit:
            raise InvalidInput.at(entry.param, f"a request may hold {limit} images, and here are more")


def _scaled(rows: Rows, output: Output, *, normalize: bool) -> Rows:
    """Return vectors of unit length, or with the length that the family gave them; other rows as they are."""
    if not normalize:
        return replace(rows, values=rows.values * rows.norms[:, None])
    if output.kind is not OutputKind.VECTOR or output.unit_length:
        return rows
    # In float64: the squares of what is beyond 1.8e19 overflow float32.
    norms = np.sqrt(np.einsum("ij,ij->i", rows.values, rows.values, dtype=np.float64))
    return replace(rows, values=(rows.values / np.maximum(norms, _EPSILON)[:, None]).astype(np.float32))


def _chunk_counts(prompts: Sequence[Prompt | TesseraError]) -> list[int]:
    chunks = [None if isinstance(prompt, TesseraError) else prompt.chunks for prompt in prompts]
    return [0 if bounds is None else len(bounds) - 1 for bounds in chunks]


def _item(entry: Input, prompt: Prompt, visions: Visions) -> wire.Item:
    return wire.Item(
        tokens=prompt.tokens.astype("<i4", copy=False).tobytes(),
        images=tuple(vision.payload for vision in visions),
        param=entry.param,
        chunks=b"" if prompt.chunks is None else prompt.chunks.astype("<i4", copy=False).tobytes(),
    )
