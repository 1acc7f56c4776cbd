"""From a validated request to vectors: obtain images, build prompts, dispatch, account for tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.config import Limits
from tessera.errors import InvalidInput, TesseraError
from tessera.frontend.deadline import Deadline
from tessera.frontend.dispatch import Dispatcher
from tessera.frontend.formats import check_width
from tessera.frontend.inputs import EmbeddingsRequest, ImageSource, Input
from tessera.frontend.media import MediaLoader
from tessera.frontend.metrics import FrontendMetrics
from tessera.models.base import Model, Prompt

# Shorter texts are tokenised on the event loop: handing them to a thread costs more than the work.
_INLINE_CHARACTERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """Vectors in input order, float32 ``[inputs, hidden]``; rows of failed inputs are zeros."""

    vectors: npt.NDArray[np.float32]
    errors: dict[int, TesseraError]
    text_tokens: int
    image_tokens: int
    cached_tokens: int
    timings: wire.Timings


class Pipeline:
    """Answers one ``EmbeddingsRequest``. Knows no wire form and no HTTP."""

    def __init__(
        self,
        model: Model,
        media: MediaLoader,
        dispatcher: Dispatcher,
        limits: Limits,
        metrics: FrontendMetrics,
    ) -> None:
        self._model = model
        self._media = media
        self._dispatcher = dispatcher
        self._limits = limits
        self._metrics = metrics
        self._max_tokens = min(limits.max_tokens or model.max_tokens, model.max_tokens)

    async def run(self, request: EmbeddingsRequest, *, request_id: str, deadline: Deadline) -> Embedded:
        """Raises the first input's error, unless the request asked for partial results."""
        self._check(request)
        images = await self._load(request.inputs, deadline)
        prompts = await self._prompts(request, images)
        errors = {index: made for index, made in enumerate(prompts) if isinstance(made, TesseraError)}
        if errors and not request.partial:
            raise errors[min(errors)]
        good = [index for index in range(len(prompts)) if index not in errors]
        vectors = np.zeros((len(prompts), self._model.hidden), np.float32)
        cached = 0
        timings = wire.Timings()
        if good:
            items = [_item(request.inputs[index], prompts[index], images[index]) for index in good]
            answer = await self._dispatcher.embed(items, request_id=request_id, deadline=deadline)
            errors |= {good[position]: error for position, error in answer.errors.items()}
            if errors and not request.partial:
                raise errors[min(errors)]
            vectors[good] = answer.vectors
            cached = sum(answer.cached_tokens)
            timings = answer.timings
        done = [
            prompt
            for index, prompt in enumerate(prompts)
            if index not in errors and isinstance(prompt, Prompt)
        ]
        text, image = sum(prompt.text_tokens for prompt in done), sum(prompt.image_tokens for prompt in done)
        self._count(request.inputs, text, image, cached)
        return Embedded(
            vectors=vectors,
            errors=errors,
            text_tokens=text,
            image_tokens=image,
            cached_tokens=cached,
            timings=timings,
        )

    def _check(self, request: EmbeddingsRequest) -> None:
        check_width(self._model.hidden, request.dimensions, request.dtype)
        allowed = {self._model.hidden} | self._model.dimensions
        if request.dimensions is not None and request.dimensions not in allowed:
            raise InvalidInput(
                f"dimensions {request.dimensions} is none of {sorted(allowed)} that this model offers",
                param="dimensions",
            )
        if not request.normalize:
            raise InvalidInput(
                "this service returns unit vectors only; leave normalize out", param="normalize"
            )
        count = sum(len(entry.images) for entry in request.inputs)
        if count > self._limits.max_images:
            raise InvalidInput(
                f"{count} images are more than the {self._limits.max_images} a request may hold"
            )

    async def _load(
        self, inputs: Sequence[Input], deadline: Deadline
    ) -> list[tuple[wire.Image, ...] | TesseraError]:
        """Each input's images, fetched at the same time, or what was wrong with the first bad one."""
        if not any(entry.images for entry in inputs):
            return [()] * len(inputs)
        return await asyncio.gather(*(self._load_input(entry, deadline) for entry in inputs))

    async def _load_input(self, entry: Input, deadline: Deadline) -> tuple[wire.Image, ...] | TesseraError:
        try:
            return tuple(await asyncio.gather(*(self._image(source, deadline) for source in entry.images)))
        except TesseraError as error:
            return error

    async def _image(self, source: ImageSource, deadline: Deadline) -> wire.Image:
        image = await self._media.load(source, deadline=deadline)
        return wire.Image(
            digest=image.digest,
            data=image.data,
            tiles=self._model.tiles(image.header.width, image.header.height),
            param=source.param,
        )

    async def _prompts(
        self, request: EmbeddingsRequest, images: Sequence[tuple[wire.Image, ...] | TesseraError]
    ) -> list[Prompt | TesseraError]:
        def build() -> list[Prompt | TesseraError]:
            return [self._prompt(request, *pair) for pair in zip(request.inputs, images, strict=True)]

        if sum(len(entry.text) for entry in request.inputs) <= _INLINE_CHARACTERS:
            return build()
        return await asyncio.to_thread(build)

    def _prompt(
        self, request: EmbeddingsRequest, entry: Input, images: tuple[wire.Image, ...] | TesseraError
    ) -> Prompt | TesseraError:
        if isinstance(images, TesseraError):
            return images
        try:
            return self._model.prompt(
                entry.text,
                [image.tiles for image in images],
                role=entry.role,
                max_tokens=min(request.max_tokens or self._max_tokens, self._max_tokens),
                truncate=request.truncate,
                param=entry.param,
            )
        except TesseraError as error:
            return error

    def _count(self, inputs: Sequence[Input], text: int, image: int, cached: int) -> None:
        with_images = sum(1 for entry in inputs if entry.images)
        self._metrics.inputs.labels("text").inc(len(inputs) - with_images)
        self._metrics.inputs.labels("image").inc(with_images)
        self._metrics.tokens.labels("text").inc(text)
        self._metrics.tokens.labels("image").inc(image)
        self._metrics.tokens.labels("cached").inc(cached)


def _item(
    entry: Input, prompt: Prompt | TesseraError, images: tuple[wire.Image, ...] | TesseraError
) -> wire.Item:
    assert isinstance(prompt, Prompt) and isinstance(images, tuple)
    return wire.Item(
        tokens=prompt.tokens.astype("<i4", copy=False).tobytes(), images=images, param=entry.param
    )
