"""What a model family has to provide, and nothing about how it is served.

A family is a package below ``tessera.models`` (or an installed package that declares a
``tessera.models`` entry point) whose ``open_model(path)`` returns a ``Model``. Opening reads
configuration and tokenizer files only and never imports torch, because the frontend opens models too;
``load_vision`` and ``load_text`` import torch and read weights, each only the tensors it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from tessera.errors import InvalidInput, TesseraError, UnsupportedOperation
from tessera.image_plan import ImagePlan as ImagePlan
from tessera.nn.outputs import CHUNKS as CHUNKS
from tessera.nn.outputs import STATES as STATES
from tessera.nn.outputs import TOKEN_WEIGHTS as TOKEN_WEIGHTS
from tessera.nn.outputs import HeadRows as HeadRows
from tessera.nn.spec import Pooling
from tessera.nn.tensors import TextTensors as TextTensors

if TYPE_CHECKING:
    import torch

    from tessera.imaging import Picture

Int32Array = npt.NDArray[np.int32]
UInt8Array = npt.NDArray[np.uint8]

Empty = Callable[[tuple[int, ...], type[np.uint8]], UInt8Array]
"""What gives memory for an array, as ``numpy.empty`` does."""


class Role(StrEnum):
    """Which side of a retrieval pair an input is on; families turn it into a prompt prefix."""

    QUERY = "query"
    PASSAGE = "passage"
    NONE = "none"


class Truncate(StrEnum):
    """What to do with an input that is too long: refuse it, drop its beginning, or drop its end.

    ``DECLARED`` drops the side that the checkpoint declares. It is of requests that name no side; models are
    not asked for it.
    """

    NONE = "NONE"
    START = "START"
    END = "END"
    DECLARED = "DECLARED"


TRUNCATIONS: Final[Mapping[str, Truncate]] = {
    value.value: value for value in (Truncate.NONE, Truncate.START, Truncate.END)
}
"""What clients may ask for, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """The vision stage of a family.

    ``row_width`` is the width of a vision row, a multiple of the backbone's width. Pixels of an image are
    ``[units, *unit_shape]``; its rows are its units times a factor that is the same for all images.
    ``largest`` is the plan of the largest image. ``independent_units`` says that units see nothing of one
    another and that each becomes whole rows: each may be run as an image of its own. With ``gives_output``
    an image becomes one row, which scaled to unit length is the output: no text engine runs for it, and its
    placeholder need not be in the vocabulary.
    """

    row_width: int
    unit_shape: tuple[int, ...]
    largest: ImagePlan
    independent_units: bool = False
    gives_output: bool = False

    @property
    def max_units(self) -> int:
        return self.largest.units

    @property
    def max_rows(self) -> int:
        return self.largest.rows

    @property
    def least_units(self) -> int:
        """The fewest units that make whole rows; every image has a multiple of them."""
        return self.largest.units // gcd(self.largest.units, self.largest.rows)

    def allows(self, plan: ImagePlan) -> bool:
        """Whether an image can become this."""
        return 1 <= plan.units <= self.largest.units and 1 <= plan.rows <= self.largest.rows

    def rows(self, units: int) -> int:
        """The rows of so many units."""
        return units * self.largest.rows // self.largest.units


class Feature(StrEnum):
    """What the modules of a family may offer beyond a call; an engine refuses by name what they do not.

    ``graphs``: CUDA graphs can record them in half precision, and the text module is a ``SplitTextModule``.
    ``fp8``: their GEMMs can run in FP8.
    """

    GRAPHS = "graphs"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pixels:
    """What preprocessing gives for one image: ``values`` ``[units, *unit_shape]``.

    uint8, or float32 that a client normalised itself, which is never rounded.
    """

    values: npt.NDArray[np.uint8] | npt.NDArray[np.float32]
    plan: ImagePlan


class OutputKind(StrEnum):
    """What comes out for one input: a vector, one for each token, a number, or weights of token ids.

    Each row of a sparse output is one weight, and the row's index the token id that it is of.
    """

    VECTOR = "vector"
    TOKENS = "tokens"
    SCORE = "score"
    SPARSE = "sparse"


OUTPUT_NAMES: Final = {
    OutputKind.VECTOR: "dense",
    OutputKind.TOKENS: "multivector",
    OutputKind.SCORE: "score",
    OutputKind.SPARSE: "sparse",
}
"""What an output is called that is the only one of its kind."""

VISION: Final = "vision"
"""The output of the vision rows of an input's images, whose placeholders are all of its tokens."""


_ROW_OF_TOKEN: Final = frozenset((OutputKind.TOKENS, OutputKind.SPARSE))

ScoreActivation = Literal["sigmoid", "identity"]
"""What makes the score of a logit that clients are told, unless they ask for the logit."""


@dataclass(frozen=True, slots=True)
class Skiplist:
    """Tokens whose rows hold nothing, by their ids, but in inputs that begin with the tokens ``keeping``.

    Without any ``keeping`` there are no such inputs.
    """

    ids: tuple[int, ...]
    keeping: tuple[int, ...] = ()

    def indices(self, tokens: Int32Array, bounds: npt.NDArray[np.int64]) -> Int32Array:
        """Return int32 ``[tokens]`` of inputs between ``bounds``: each token, -1 for one without a row."""
        dropped = np.isin(tokens, self.ids)
        if self.keeping:
            starts, lengths = bounds[:-1], np.diff(bounds)
            keeps = lengths >= len(self.keeping)
            for place, token in enumerate(self.keeping):
                keeps &= tokens[np.minimum(starts + place, len(tokens) - 1)] == token
            dropped &= ~np.repeat(keeps, lengths)
        return np.where(dropped, np.int32(-1), tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The rows that an input becomes: float32, ``width`` wide (1 for a score).

    ``unit_length`` says that a row is scaled to length 1 before anybody sees it, ``pooling`` how rows are
    made of the tokens' states; None where the family does not say. ``activation`` is of scores.
    ``name`` is what requests call it, without one as its kind is called. Rows of a sparse output are one
    wide, and ``most`` bounds them for an input; without it an input has at most one for each token. Of the
    output ``CHUNKS`` it has one for each of its chunks, which are counted in place of its tokens.
    ``skiplist`` is of token vectors.
    """

    kind: OutputKind
    width: int
    name: str = ""
    most: int | None = None
    unit_length: bool = True
    pooling: Pooling | None = None
    activation: ScoreActivation = "sigmoid"
    skiplist: Skiplist | None = None

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", OUTPUT_NAMES[self.kind])

    def rows(self, tokens: int) -> int:
        """How many rows an input of so many tokens becomes, known before any work is done.

        Those of them whose index is -1 hold nothing, see ``tessera.rows.Rows``.
        """
        if self.kind in _ROW_OF_TOKEN:
            return tokens if self.most is None else self.most
        return 1

    def bounds(self, sizes: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return int64 ``[inputs + 1]``, the bounds of the rows of inputs of so many tokens, or chunks."""
        if self.kind not in _ROW_OF_TOKEN:
            return np.arange(len(sizes) + 1)
        return np.cumsum([0, *map(self.rows, sizes)], dtype=np.int64)


TokenIds = npt.NDArray[np.int64]
"""A client's own token ids, ``[n]``, which no vocabulary bounds."""

Part = str | TokenIds | ImagePlan
"""A part of an input: a text, token ids, or an image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """One input: its texts and images in the client's order.

    Token ids are taken as they are, without prefix, instruction or special tokens. They come alone, or before
    the images whose placeholders they hold.
    ``instruction`` is None where the client gave none. ``prompt`` takes the place of the role's prompt; only
    families that read what a checkpoint declares are given one. With ``chunked`` each text is a chunk, whose
    tokens no other text shares; models with ``chunks`` alone are given such a content.
    """

    parts: tuple[Part, ...]
    role: Role = Role.NONE
    instruction: str | None = None
    prompt: str | None = None
    chunked: bool = False

    @property
    def images(self) -> tuple[ImagePlan, ...]:
        return tuple(part for part in self.parts if isinstance(part, ImagePlan))

    @property
    def token_ids(self) -> TokenIds | None:
        """Token ids among its parts, if there are any."""
        return next((part for part in self.parts if isinstance(part, np.ndarray)), None)

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(part for part in self.parts if isinstance(part, str))

    @property
    def text(self) -> str:
        """The texts, joined as they are."""
        return "".join([part for part in self.parts if isinstance(part, str)])

    def prompt_of(self, prompts: Mapping[Role, str]) -> str:
        """Return the content's own prompt, or else its role's."""
        return prompts[self.role] if self.prompt is None else self.prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One input as the backbone reads it.

    ``tokens`` is int32 ``[n]`` with a placeholder token for each vision row; ``image_tokens`` counts the
    placeholders. ``truncated`` says that text was dropped. ``chunks``, int32 ``[chunks + 1]``, bounds the
    chunks of a content that has some: a prompt and control tokens around them are in none.
    """

    tokens: Int32Array
    image_tokens: int
    truncated: bool = False
    chunks: Int32Array | None = None

    @property
    def text_tokens(self) -> int:
        return len(self.tokens) - self.image_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One token of a text; ``start`` and ``stop`` are its place in characters, None for special tokens."""

    token: int
    text: str
    start: int | None = None
    stop: int | None = None


class VisionModule(Protocol):
    """Pixels of whole images, packed, to their vision rows ``[rows, row_width]``, packed in the same order.

    Indices come from the host; nothing in the call may wait for the device. Whether an image sees another
    one is the module's to prevent, by ``cu_units``. Units behind the last bound belong to no image: what
    comes out for them is never read. Images may be empty. While a CUDA graph is recorded, positions are 0 and
    ``units`` is one length that no image exceeds; the images of a replay are those of ``cu_units``.
    """

    def __call__(
        self,
        pixels: torch.Tensor,  # [units, *unit_shape], uint8 or float32
        positions: torch.Tensor,  # int32 [j, units], ``Model.unit_positions`` of the images side by side
        cu_units: torch.Tensor,  # int32 [images + 1], the images' bounds in the packed axis
        units: Sequence[int],  # the same bounds on the host, as lengths
    ) -> torch.Tensor: ...


class TextModule(Protocol):
    """A packed batch → float32 rows, as long as pooling made them.

    ``[batch, width]`` where the output is one row for each input, ``[tokens, width]`` where it is one for
    each token. Whoever runs the module scales them to unit length: some clients ask for them as they are.

    Nothing in the call may wait for the device.
    """

    def __call__(self, batch: TextTensors) -> torch.Tensor: ...


@runtime_checkable
class SplitTextModule(TextModule, Protocol):
    """A text module in two parts, one behind the other.

    CUDA graphs record the second alone, since vision rows have other places in each batch. Tokens behind the
    last bound belong to no sequence. While a graph is recorded, ``lengths`` is one length that no sequence
    exceeds; the sequences of a replay are those of ``cu_seqlens``.
    """

    def embed(
        self, input_ids: torch.Tensor, vision_rows: torch.Tensor, vision_index: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Tensors ``[tokens, ...]``: token embeddings, and what later layers take of the vision rows."""
        ...

    def pooled(
        self,
        embedded: tuple[torch.Tensor, ...],
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor,
        lengths: Sequence[int],
    ) -> torch.Tensor:
        """What follows ``embed``, whose tensors may be overwritten; rows as the whole call gives them."""
        ...


@runtime_checkable
class NamingModule(TextModule, Protocol):
    """A text module that gives several outputs of one pass."""

    def named(self, names: Sequence[str], batch: TextTensors) -> Sequence[HeadRows]:
        """As the call, for the outputs of these names; an empty one is the default output.

        ``CHUNKS`` gives a row for each of the batch's segments.
        """
        ...


class Model(Protocol):
    """One checkpoint, described without torch.

    A model may have these as well, which functions of this package ask for by name:

    - ``outputs``: all that it gives of one pass, the default first, no two of one name;
    - ``chunks``: the output ``CHUNKS``, pooled of each chunk by itself behind one pass over the whole;
    - ``token_weights``: the output ``TOKEN_WEIGHTS``, of all tokens but the first and the last;
    - ``declared``: what the checkpoint declares beside its weights;
    - ``truncation_side``: ``START`` or ``END``, the side that it declares to be dropped;
    - ``try_out()``: raises ``CheckpointError`` for a tokenizer that ends its process, a child of this one.
    """

    @property
    def family(self) -> str: ...

    @property
    def path(self) -> Path: ...

    @property
    def fingerprint(self) -> str:
        """Names weights, preprocessing, prompts and options; part of every cache key.

        A family may look at a sample of the weights alone; what its fingerprint cannot tell apart is said
        where it is computed.
        """
        ...

    @property
    def output(self) -> Output:
        """What an input becomes where a request names no output: the first of those that it declares."""
        ...

    @property
    def vision(self) -> VisionSpec | None:
        """The vision stage; None for a family that reads text alone."""
        ...

    @property
    def max_tokens(self) -> int:
        """Longest input, in tokens, that the backbone was made for."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def dimensions(self) -> frozenset[int]:
        """Widths other than the output's that the checkpoint was trained to be cut to."""
        ...

    @property
    def features(self) -> frozenset[Feature]:
        """What the modules that it loads offer beyond a call."""
        ...

    def plan(self, width: int, height: int, *, param: str) -> ImagePlan:
        """What an image of this upright size becomes.

        Raises ``InvalidInput`` naming ``param`` for a size that the family does not take.
        """
        ...

    def prompt(self, content: Content, *, max_tokens: int, truncate: Truncate, param: str) -> Prompt:
        """Tokenise one input; the placeholders of its images are in the order of the images.

        Raises ``InvalidInput`` naming ``param`` for an input that is too long and may not be truncated, for
        an empty one, for a token id outside the vocabulary, for token ids beside texts, for other
        placeholders among them than the images have rows, and for images or an instruction where the family
        takes none.
        """
        ...

    def pieces(self, text: str, *, role: Role, instruction: str | None = None, param: str) -> Sequence[Piece]:
        """The tokens that a text is embedded as, special ones included; places count the role's prefix.

        Raises ``InvalidInput`` naming ``param`` for what is no text.
        """
        ...

    def token_text(self, token: int) -> str:
        """What the vocabulary calls a token; an id beyond it is an empty text."""
        ...

    def vision_index(self, tokens: Int32Array) -> Int32Array:
        """Positions of the placeholders in ``tokens``, ascending."""
        ...

    def positions(self, tokens: Int32Array, images: Sequence[ImagePlan]) -> Int32Array:
        """int32 ``[k, tokens]``: where RoPE has each token of one input; k is 1, or 3 for mRoPE."""
        ...

    def unit_positions(self, image: ImagePlan) -> Int32Array:
        """int32 ``[j, units]``: what the vision module has to know of each unit's place; j may be 0."""
        ...

    def preprocess(self, picture: Picture, empty: Empty = np.empty) -> Pixels:
        """The pixels of a picture, in memory that is asked of ``empty`` once; thread-safe.

        Raises ``UnsupportedMedia`` or ``InvalidInput`` naming the picture's ``param``.
        """
        ...

    def load_vision(self, *, dtype: str, device: str) -> VisionModule: ...

    def load_text(self, *, dtype: str, device: str) -> TextModule: ...

    def vision_nbytes(self, dtype: str) -> int:
        """Bytes of the weights that ``load_vision`` keeps."""
        ...

    def text_nbytes(self, dtype: str) -> int: ...

    def vision_activation_nbytes(self, dtype: str, units: int) -> int:
        """Bytes that a vision batch of so many units takes beside the weights, at its widest point."""
        ...

    def text_activation_nbytes(self, dtype: str, tokens: int) -> int:
        """Bytes that a text batch of so many tokens takes beside the weights, at its widest point."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLimits:
    """How long a pair may be, in tokens: as a whole, and its sides where they have bounds of their own.

    ``truncate`` says what becomes of a pair that is too long as a whole: its document is cut. A side over a
    bound of its own is cut at its end.
    """

    tokens: int
    query: int | None = None
    document: int | None = None
    truncate: Truncate = Truncate.NONE


class InputTask(msgspec.Struct, frozen=True):
    """What the prompt of one input is made of."""

    content: Content
    max_tokens: int
    truncate: Truncate
    param: str

    def prompts(self, model: Model) -> list[Prompt | TesseraError]:
        """Return the prompt, or its error."""
        most, truncate = self.max_tokens, self.truncate
        try:
            return [model.prompt(self.content, max_tokens=most, truncate=truncate, param=self.param)]
        except TesseraError as error:
            return [error.kept()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Documents with their query; ``param`` names the query, and ``params`` name the documents."""

    query: Content
    documents: Sequence[Content]
    limits: PairLimits
    param: str
    params: Sequence[str]

    def prompts(self, model: Model) -> list[Prompt | TesseraError]:
        """Return the prompt of each document with its query, or its error."""
        assert isinstance(model, PairModel)
        try:
            return [*model.pairs(self)]
        except TesseraError as error:
            return [error.kept()] * len(self.documents)


@runtime_checkable
class PairModel(Model, Protocol):
    """A model whose output is a score, one of each pair."""

    def pairs(self, asked: Pairs) -> list[Prompt | InvalidInput]:
        """Each document with the query, whose tokens are made once.

        The placeholders of the query's images come before those of the document's. What is wrong with a
        document stands in its place.

        Raises ``InvalidInput`` naming the query for one that is no side of a pair, or that leaves a document
        no room.
        """
        ...


@runtime_checkable
class StagedModel(Model, Protocol):
    """A model whose stages can be asked for their own rows, ``STATES`` and ``VISION``."""

    @property
    def state_width(self) -> int: ...

    @property
    def image_token_id(self) -> int:
        """The placeholder of a vision row, -1 for a family without images."""
        ...


SCORES: Final = Output(kind=OutputKind.SCORE, width=1, unit_length=False)
"""What items become that are compared with queries."""


def parameters_of(model: Model) -> int:
    """Return how many parameters an input passes: both stages', or its tower's where an image passes one."""
    dtype = "bfloat16"
    if model.vision is None:
        return model.text_nbytes(dtype) // 2
    alone = model.vision.gives_output
    return (model.vision_nbytes(dtype) + (0 if alone else model.text_nbytes(dtype))) // 2


def truncation_of(model: Model, asked: Truncate) -> Truncate:
    """Return what a model is asked for: the side that it declares, or the end, for ``DECLARED``."""
    if asked is not Truncate.DECLARED:
        return asked
    side: Truncate = getattr(model, "truncation_side", Truncate.END)
    return side


def chunks_of(model: Model) -> Output | None:
    """Return the output of chunks, None where a vector is not the mean of its tokens' states."""
    chunks: Output | None = getattr(model, "chunks", None)
    return chunks


def unlisted_of(model: Model) -> Mapping[str, Output]:
    """Return the outputs by name that requests for several do not name: routes of their own ask for them."""
    found = chunks_of(model), getattr(model, "token_weights", None)
    return {output.name: output for output in found if output is not None}


class Named(Protocol):
    """What has a name."""

    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)


def outputs_named(model: str, outputs: Sequence[N], names: Sequence[str], param: str) -> tuple[N, ...]:
    """Return a model's outputs of these names in their order, without any the first, its default.

    Raises ``InvalidInput`` for ``param``, naming what the model has.
    """
    if not names:
        return (outputs[0],)
    found = {output.name: output for output in outputs}
    for name in names:
        if name not in found:
            raise InvalidInput(
                f"{param}: {model!r} has no output {name!r}; it has {', '.join(found)}", param=param
            )
    return tuple([found[name] for name in names])


def outputs_of(model: Model) -> Sequence[Output]:
    """The outputs that a model declares, the default first."""
    return (model.output, *getattr(model, "outputs", ())[1:])


class Outputs:
    """All that a request may ask a model for, by name: its outputs, those of routes and of its stages."""

    def __init__(self, declared: Sequence[Output], stages: Sequence[Output] = ()) -> None:
        self._default = (declared[0],)
        self.declared = tuple(declared)
        self.by_name: Mapping[str, Output] = {output.name: output for output in (*declared, *stages)}

    @classmethod
    def of_model(cls, model: Model) -> Outputs:
        """Return what a model declares, what its stages give, and what routes of their own ask for."""
        stages = []
        if isinstance(model, StagedModel):
            width = model.state_width
            stages.append(Output(kind=OutputKind.TOKENS, width=width, unit_length=False, name=STATES))
        if model.vision is not None:
            width = model.vision.row_width
            stages.append(Output(kind=OutputKind.TOKENS, width=width, unit_length=False, name=VISION))
        return cls(outputs_of(model), [*stages, *unlisted_of(model).values()])

    def of(self, names: Sequence[str]) -> tuple[Output, ...]:
        """Return the outputs of these names, without any the default.

        Raises ``UnsupportedOperation`` naming what the model has.
        """
        if not names:
            return self._default
        return tuple(map(self._named, names))

    def _named(self, name: str) -> Output:
        if name not in self.by_name:
            has = ", ".join(output.name for output in self.declared)
            raise UnsupportedOperation(f"this model has no output {name!r}; it has {has}")
        return self.by_name[name]


def sequential(tokens: int) -> Int32Array:
    """int32 ``[1, tokens]``: 0, 1, 2, … for families with one-dimensional positions."""
    return np.arange(tokens, dtype=np.int32)[None]


class Family(Protocol):
    """A registered family: the ``model_type`` values it serves and how to open a checkpoint.

    A family may have these as well, as ``OptionsFamily`` does:

    - ``architectures``: the values of that key in ``config.json`` that it serves, all where it names none. A
      ``config.json`` without them is of the first family of its ``model_type``;
    - ``task``: it serves checkpoints of this task alone, where they or the model option ``task`` name it.
      Without one it serves those that no such family does;
    - ``hub_models``: published models, by their names on the hub.
    """

    @property
    def name(self) -> str: ...

    @property
    def model_types(self) -> Sequence[str]: ...

    def open_model(self, path: Path, options: Mapping[str, object]) -> Model:
        """Open a checkpoint; ``options`` are the family's own (limits of a resize, say), by name.

        Raises ``CheckpointError``, and ``ConfigError`` naming an option that the family does not know.
        """
        ...


def architectures_of(family: Family) -> Sequence[str]:
    """The values of ``architectures`` that a family serves, none for one that takes all."""
    architectures: Sequence[str] = getattr(family, "architectures", ())
    return architectures
