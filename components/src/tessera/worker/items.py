"""Reads the items of a request: checks them, and makes the text engine's inputs of them."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from tessera import wire
from tessera.engine.batch import PackedInput
from tessera.errors import InvalidInput, ProtocolError, UnsupportedOperation
from tessera.models.base import CHUNKS, SCORES, STATES, VISION, Model, Output, OutputKind, Outputs

_INT32: Final = np.dtype("<i4")
_NO_TEXT: Final = PackedInput(tokens=np.empty(0, np.int32), positions=np.empty((0, 0), np.int32))
_UINT32: Final = np.dtype("<u4")
_FLOAT32: Final = np.dtype("<f4")


class ItemReader:
    """Reads items for one model; ``gives`` has the outputs by name that its text engine offers.

    Without ``images`` no item may have any.
    """

    def __init__(self, model: Model, *, images: bool, gives: Collection[str]) -> None:
        self._model = model
        self._images = images
        self._gives = gives
        self._outputs = Outputs.of_model(model)
        # Looked up once: they are used for every text.
        self._vocab_size = model.vocab_size
        self._max_tokens = model.max_tokens
        self._gives_output = model.vision is not None and model.vision.gives_output
        self._is_placeholder = lru_cache(maxsize=16)(self._find_placeholder)

    def read(self, item: wire.Item, asked: tuple[str, ...] = ()) -> PackedInput:
        """Return the text engine's input, without the rows of its images.

        ``asked`` are the outputs that are asked for. Raises ``InvalidInput`` naming the item or one of its
        images.
        """
        if item.images and self._gives_output:
            return self._image_alone(item, asked)
        if not item.tokens or len(item.tokens) % 4:
            raise InvalidInput("the tokens are empty or not int32", param=item.param)
        unsigned = np.frombuffer(item.tokens, _UINT32)
        tokens = unsigned.view(_INT32)
        # An id outside the table would read foreign memory on a GPU; as unsigned a negative one is large.
        if np.maximum.reduce(unsigned) >= self._vocab_size:
            raise InvalidInput(f"token ids must be in 0..{self._vocab_size - 1}", param=item.param)
        if len(tokens) > self._max_tokens:
            raise InvalidInput(f"{len(tokens)} tokens are more than {self._max_tokens}", param=item.param)
        if item.images:
            return self._with_images(item, tokens, asked)
        if item.chunks:
            return self._with_chunks(item, tokens, asked)
        return PackedInput(tokens=tokens, positions=self._model.positions(tokens, ()), asked=asked)

    def _image_alone(self, item: wire.Item, asked: tuple[str, ...]) -> PackedInput:
        """Return what stands for an image whose row is the output: no text engine sees it."""
        first = item.images[0]
        if not self._images:
            raise InvalidInput("the model reads text alone", param=first.param)
        if not self._is_placeholder(item.tokens) or len(item.images) > 1 or first.plan.rows != 1:
            raise InvalidInput("an image is an input of its own in this model", param=item.param)
        if STATES in asked:
            raise InvalidInput("an image has no hidden states of tokens", param=item.param)
        return _NO_TEXT

    def _find_placeholder(self, tokens: bytes) -> bool:
        """Whether it is a placeholder that is the only token."""
        return len(tokens) == 4 and len(self._model.vision_index(np.frombuffer(tokens, _INT32))) == 1

    def _with_chunks(
        self, item: wire.Item, tokens: npt.NDArray[np.int32], asked: tuple[str, ...]
    ) -> PackedInput:
        bounds = np.frombuffer(item.chunks[: len(item.chunks) // 4 * 4], _INT32)
        ascend = len(bounds) > 1 and bool((bounds[1:] > bounds[:-1]).all())
        if len(item.chunks) % 4 or not ascend or bounds[0] < 0 or bounds[-1] > len(tokens):
            raise InvalidInput(f"the chunks are not bounds in {len(tokens)} tokens", param=item.param)
        positions = self._model.positions(tokens, ())
        return PackedInput(tokens=tokens, positions=positions, asked=asked, chunks=bounds)

    def _with_images(
        self, item: wire.Item, tokens: npt.NDArray[np.int32], asked: tuple[str, ...]
    ) -> PackedInput:
        if not self._images:
            raise InvalidInput("the model reads text alone", param=item.images[0].param)
        plans = [image.plan for image in item.images]
        index = self._model.vision_index(tokens)
        expected = sum(plan.rows for plan in plans)
        if len(index) != expected or any(plan.rows < 1 for plan in plans):
            raise InvalidInput(
                f"found {len(index)} image tokens, but the {len(item.images)} images need {expected}",
                param=item.param,
            )
        positions = self._model.positions(tokens, plans)
        return PackedInput(tokens=tokens, positions=positions, vision_index=index, asked=asked)

    def outputs(self, request: wire.EmbedRequest) -> tuple[Output, ...]:
        """Return the outputs of a request with queries, or that names some.

        Raises what is wrong with such a request.
        """
        names = request.outputs
        if not names:
            return (SCORES,)
        if request.queries:
            raise ProtocolError(f"queries came with a request for the outputs {', '.join(names)}")
        outputs = self._outputs.of(names)
        chunked = CHUNKS in names
        for item in request.items:
            if bool(item.chunks) is not chunked or (chunked and (item.images or len(names) > 1)):
                raise InvalidInput("chunks of text have the output 'chunks', and no other", param=item.param)
        if names != (VISION,):
            for name in names:
                if name not in self._gives:
                    raise UnsupportedOperation(
                        f"the text engine of this service gives no output {name!r}; it needs engine: torch"
                    )
        else:
            for item in request.items:
                # That there are as many placeholders as rows is checked as for any item.
                if item.token_count != sum(image.plan.rows for image in item.images):
                    raise InvalidInput("the tokens are not the images' placeholders alone", param=item.param)
        return outputs

    def queries(self, request: wire.EmbedRequest) -> list[npt.NDArray[np.float32]]:
        """Return the rows of each query ``[rows, width]``; raises ``ProtocolError``."""
        if not request.queries:
            return []
        width = self._model.output.width
        if self._model.output.kind is not OutputKind.TOKENS:
            raise ProtocolError("queries came with items that do not become a row for each token")
        if any(not query or len(query) % (4 * width) for query in request.queries):
            raise ProtocolError(f"a query is not of rows of {width} float32 values")
        if any(not 0 <= item.query < len(request.queries) for item in request.items):
            raise ProtocolError(f"an item names none of the {len(request.queries)} queries")
        # Copies: torch warns of memory that it might not write to.
        return [np.frombuffer(query, _FLOAT32).reshape(-1, width).copy() for query in request.queries]
