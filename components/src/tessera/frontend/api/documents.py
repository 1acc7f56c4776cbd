"""Documents that come in chunks: one input, whose chunks have a vector each of one pass over the whole."""

from __future__ import annotations

from collections.abc import Sequence

from tessera.errors import InvalidInput
from tessera.frontend.request import Input, RequestLimits
from tessera.frontend.serving.served import Served
from tessera.models.base import CHUNKS


def document_of(chunks: Sequence[Input], param: str, limits: RequestLimits) -> Input:
    """Return the document ``param`` of at least one chunk, in their order.

    Raises ``InvalidInput`` naming the first chunk that is no text, or has another role, prompt or instruction
    than those before it, and the document if it is too long.
    """
    first = chunks[0]
    for chunk in chunks:
        if not all(isinstance(part, str) for part in chunk.parts):
            raise InvalidInput.at(
                chunk.param, "the chunks of a document are texts, and here is something else"
            )
        if _around(chunk) != _around(first):
            raise InvalidInput.at(
                chunk.param, "has another role or instruction than the chunks before it of one document"
            )
    texts = ["".join(map(str, chunk.parts)) for chunk in chunks]
    size = sum(map(len, texts))
    if size > limits.characters:
        raise InvalidInput.at(
            param, f"expected at most {limits.characters} characters in a document, found {size}"
        )
    return Input(
        parts=tuple(texts),
        role=first.role,
        instruction=first.instruction,
        prompt_name=first.prompt_name,
        param=param,
        chunked=True,
        size=size,
    )


def check_chunks(served: Served, param: str) -> None:
    """Raise ``InvalidInput`` naming ``param`` for a model that gives chunks no vectors of their own."""
    if CHUNKS not in served.unlisted:
        raise InvalidInput.at(
            param,
            f"the vector of a chunk is the mean of its tokens' states, and {served.model!r} makes "
            "vectors of other states, or none; send each chunk by itself",
        )


def _around(chunk: Input) -> tuple[object, ...]:
    return chunk.role, chunk.instruction, chunk.prompt_name
