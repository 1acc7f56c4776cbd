"""The Python API: ``from tessera import Embedder``."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future
from dataclasses import dataclass
from operator import length_hint
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeAlias, TypedDict, overload

import numpy as np
import numpy.typing as npt

from tessera.errors import InvalidInput, UnsupportedRoute
from tessera.frontend.api.formats import sigmoid
from tessera.frontend.api.values import expected
from tessera.frontend.widths import Widths
from tessera.local.background import BackgroundEngines
from tessera.local.collected import SparseVector as SparseVector
from tessera.local.collected import collecting
from tessera.local.content import Content
from tessera.local.flags import check_worker_flags
from tessera.local.groups import Size, size_of, take
from tessera.local.inputs import InputLike, read_input, read_inputs
from tessera.local.model_info import ModelInfo
from tessera.local.options import VectorOptions
from tessera.local.plan import plan_engines
from tessera.local.vectors import Vectors
from tessera.local.wanted import DEFAULT, Wanted
from tessera.models.base import TRUNCATIONS, OutputKind, Role

Progress: TypeAlias = bool | Callable[[int, int | None], object]
"""True for a line on standard error, or what is called with the inputs that are done and how many there
are: None where a generator does not say."""
EmbeddedInputs: TypeAlias = npt.NDArray[np.float32] | Any
"""float32 ``[inputs, width]``; of a model with token vectors a list of float32 ``[tokens, width]``, and of
one with sparse weights a list of ``SparseVector``, which a type checker is not made to ask for everywhere."""


class EmbeddedOutputs(TypedDict, total=False):
    """The outputs that were asked for by name, each of all inputs in their order.

    ``dense`` is float32 ``[inputs, width]``, and ``multivector`` has a float32 ``[tokens, width]`` of each.
    """

    dense: npt.NDArray[np.float32]
    sparse: list[SparseVector]
    multivector: list[npt.NDArray[np.float32]]


_Reporter = Callable[[int, bool], object]
"""Is called with the inputs that are done, and whether no more will be."""

_LINE_SECONDS: Final = 0.2
_ENGINE_LOG: Final = ("--log-level", "warning")


@dataclass(frozen=True, slots=True, order=True)
class Ranked:
    """The place of a document among those that were given, and its score; sorted, they have that order."""

    index: int
    score: float


class Embedder:
    """A model in processes of its own, one for each GPU, for all threads of this process.

    Errors are those of ``tessera.errors`` and name the input: ``error.param == "input[3]"``.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        revision: str = "",
        gpus: int | None = None,
        truncate: Literal["none", "start", "end"] = "none",
        max_tokens: int = 0,
        allow_private_media: bool = False,
        worker_flags: Sequence[str] = (),
    ) -> None:
        """Load ``ORG/MODEL[@REVISION]`` of a hub or a directory, and wait until it can be used.

        ``gpus`` is how many are used at most, of those that CUDA_VISIBLE_DEVICES shows: all by default.
        ``truncate`` says what becomes of an input of more tokens than the model takes, or than
        ``max_tokens``: an error, or it loses its start or its end. Image URLs reach public addresses, private
        ones as well with ``allow_private_media``. ``worker_flags`` are those of ``python -m tessera.worker``.
        Raises ``ConfigError`` and ``CheckpointError``.
        """
        if str(truncate).upper() not in TRUNCATIONS:
            raise expected("truncate", "none, start or end", truncate)
        for name, value, least in (("gpus", gpus, 1), ("max_tokens", max_tokens, 0)):
            if value is not None and (not isinstance(value, int) or value < least):
                raise expected(name, f"a number of at least {least}", value)
        check_worker_flags(worker_flags)
        plan = plan_engines(
            os.fspath(model),
            revision,
            VectorOptions(truncate=TRUNCATIONS[truncate.upper()], max_tokens=max_tokens),
            flags=worker_flags,
            log=_ENGINE_LOG,
            bar=sys.stderr.isatty(),
            most=gpus,
            scores=True,
            allow_private_media=allow_private_media,
        )
        self._engines = BackgroundEngines(plan)
        # A process that ends takes its engines along.
        weakref.finalize(self, self._engines.abandon).atexit = False

    @property
    def model(self) -> ModelInfo:
        """What the model is: its name, ``kind`` of output, ``width`` and narrower ``dimensions``."""
        return self._engines.model

    @overload
    def embed(
        self,
        inputs: Iterable[InputLike],
        *,
        role: Literal["query", "passage"] | None = None,
        instruction: str | None = None,
        dimensions: int | None = None,
        outputs: None = None,
        progress: Progress = False,
    ) -> EmbeddedInputs: ...

    @overload
    def embed(
        self,
        inputs: Iterable[InputLike],
        *,
        role: Literal["query", "passage"] | None = None,
        instruction: str | None = None,
        dimensions: int | None = None,
        outputs: Sequence[str],
        progress: Progress = False,
    ) -> EmbeddedOutputs: ...

    def embed(
        self,
        inputs: Iterable[InputLike],
        *,
        role: Literal["query", "passage"] | None = None,
        instruction: str | None = None,
        dimensions: int | None = None,
        outputs: Sequence[str] | None = None,
        progress: Progress = False,
    ) -> EmbeddedInputs | EmbeddedOutputs:
        """Return the vectors of inputs, in their order, as float32 ``[inputs, width]``.

        Of a model with token vectors it is a list with float32 ``[tokens, width]`` for each input. An input
        is a text, an image (a path, bytes, a PIL image), an object with ``text`` and ``image``, or a list of
        such parts; ``image`` may be a URL as well. Inputs are taken as they are needed. ``role`` is what they
        are for, ``instruction`` what a query's prompt says where the model takes one, and ``dimensions`` a
        width that the model offers. With ``outputs``, names of ``model.outputs``, the answer has each of them
        by its name, all of one pass. Raises ``TesseraError`` where an input cannot be embedded.
        """
        info = self.model
        if info.kind is OutputKind.SCORE:
            raise UnsupportedRoute(f"{info.name} gives scores of pairs, and no vectors: use rerank")
        width = self._width(dimensions)
        contents = read_inputs(inputs, "input", _role(role), _instruction(instruction))
        asked = info.of_width(width).asked(_names(outputs), "outputs")
        most = length_hint(inputs, 1024)
        collected = {output.name: collecting(output.kind, output.width, most) for output in asked}
        wanted = DEFAULT if outputs is None else Wanted(outputs=tuple(collected))
        for vectors in self._run(contents, wanted, _reporter(progress, inputs)):
            for found, rows in zip(collected.values(), vectors.rows.each(), strict=True):
                found.add(rows)
        results: Any = {name: found.result() for name, found in collected.items()}
        return results[asked[0].name] if outputs is None else results

    def rerank(
        self,
        query: InputLike,
        documents: Iterable[InputLike],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        logits: bool = False,
        progress: Progress = False,
    ) -> list[Ranked]:
        """Return the documents' places and scores, the best first, at most ``top_n`` of them.

        A reranker's score is a probability, or as it came with ``logits``; other models give the cosine, and
        those with token vectors MaxSim. A document that is too long loses its end. Raises as ``embed``;
        errors name ``query`` or ``documents[3]``.
        """
        if top_n is not None and (not isinstance(top_n, int) or top_n < 1):
            raise expected("top_n", "a number of at least 1", top_n)
        asked = read_input(query, "query", Role.QUERY, _instruction(instruction))
        contents = read_inputs(documents, "documents", Role.PASSAGE, None)
        given: list[float] = []
        for vectors in self._run(contents, Wanted(query=asked), _reporter(progress, documents)):
            given += vectors.rows.values[:, 0].tolist()
        values = np.array(given, np.float32)
        # By what the model gave: as probabilities, far logits become equal.
        order = np.argsort(-values, kind="stable")[:top_n]
        kind, activation = self.model.kind, self.model.activation
        probable = kind is OutputKind.SCORE and activation == "sigmoid" and not logits
        scores = sigmoid(values) if probable else values
        return [Ranked(int(index), float(scores[index])) for index in order]

    def close(self) -> None:
        """End the processes; calls of other threads raise ``Unavailable``, and so do later ones."""
        self._engines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, contents: Iterator[Content], wanted: Wanted, report: _Reporter) -> Iterator[Vectors]:
        """Yield what is wanted of contents, group by group in their order."""
        waiting: deque[tuple[Sequence[Content], Future[Vectors]]] = deque()
        done = 0
        self._engines.check()
        own = size_of(wanted.query.parts) if wanted.query is not None else (0, 0)

        def size(content: Content) -> Size:
            weight, nbytes = size_of(content.parts)
            return weight + own[0], nbytes + own[1]

        try:
            while True:
                group, total = take(contents, size)
                if group:
                    waiting.append((group, self._engines.submit(group, wanted, total)))
                while waiting and (not group or waiting[0][1].done()):
                    vectors = self._vectors(*waiting.popleft())
                    done += len(vectors)
                    report(done, False)
                    yield vectors
                if not group:
                    return
        finally:
            report(done, True)
            for _, future in waiting:
                future.cancel()

    def _vectors(self, group: Sequence[Content], future: Future[Vectors]) -> Vectors:
        vectors = self._engines.wait(future)
        if vectors.errors:
            place = min(vectors.errors)
            error = vectors.errors[place]
            raise error if error.param is not None else error.named(group[place].param)
        return vectors

    def _width(self, dimensions: int | None) -> int:
        info = self.model
        widths = Widths.offered(info.dimensions, info.width, "")
        if dimensions is None:
            return info.width
        if not isinstance(dimensions, int) or dimensions not in widths:
            raise InvalidInput(f"dimensions {dimensions}: this model offers {widths}", param="dimensions")
        return dimensions


def _role(role: str | None) -> Role:
    if role is None:
        return Role.NONE
    if role not in (Role.QUERY, Role.PASSAGE):
        raise expected("role", "query or passage", role)
    return Role(role)


def _names(outputs: Sequence[str] | None) -> Sequence[str]:
    if outputs is None:
        return ()
    if not outputs or isinstance(outputs, str) or not all(isinstance(name, str) for name in outputs):
        raise expected("outputs", "a list of names", outputs)
    return outputs


def _instruction(instruction: str | None) -> str | None:
    if instruction is not None and not (isinstance(instruction, str) and instruction):
        raise expected("instruction", "text", instruction)
    return instruction


def _reporter(progress: Progress, inputs: object) -> _Reporter:
    total = len(inputs) if isinstance(inputs, Sized) else None
    if callable(progress):
        report = progress
        return lambda done, ended: ended or report(done, total)
    return _Line(total).show if progress else lambda done, ended: None


class _Line:
    """Keeps a line on standard error up to date."""

    def __init__(self, total: int | None) -> None:
        self._of = "" if total is None else f" of {total:,}"
        self._started = time.monotonic()
        self._next = 0.0

    def show(self, done: int, ended: bool) -> None:
        seconds = time.monotonic() - self._started
        if seconds >= self._next or ended:
            self._next = seconds + _LINE_SECONDS
            end = "\n" if ended else ""
            sys.stderr.write(f"\r{done:,}{self._of} done, {done / max(seconds, 1e-9):,.1f}/s{end}")
            sys.stderr.flush()
