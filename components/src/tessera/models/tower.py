"""What models with a text tower and prompts of segments have in common; opening needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from importlib import import_module
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, NoReturn

import msgspec
import numpy as np

from tessera.checkpoint.declared import Declared, Dense, LayerNorm, read_declared
from tessera.checkpoint.fingerprint import fingerprint
from tessera.checkpoint.safetensors import StoredTensor
from tessera.checkpoint.section import CONFIG_FILE
from tessera.checkpoint.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, PlainTokenizer
from tessera.checkpoint.trial import try_tokenizer
from tessera.checkpoint.weights import Shapes, stored_tensors, weight_files
from tessera.dtypes import FLOATS
from tessera.errors import ConfigError, InvalidInput
from tessera.imaging import Picture
from tessera.models.base import (
    CHUNKS,
    Content,
    Empty,
    Feature,
    ImagePlan,
    Int32Array,
    Output,
    OutputKind,
    Piece,
    Pixels,
    Prompt,
    Role,
    ScoreActivation,
    Truncate,
    VisionSpec,
    sequential,
)
from tessera.models.declared import RolePrompts, declared_text, longest
from tessera.models.marks import Marks
from tessera.models.prompts import Assembler, Run, Segment, prompt_of_ids, refuse_instruction
from tessera.models.stages import Axis, StageFamily, StageModule, check_stage
from tessera.models.stored_names import part_name
from tessera.nn.spec import EncoderSpec, TextSpec

NO_PROMPTS: Final[Mapping[Role, str]] = dict.fromkeys(Role, "")


class TowerModel:
    """Base of families that run ``nn.text.TextTower``; thread-safe once opened.

    What it says of images is that of a family without them.

    ``version`` is raised by hand whenever preprocessing, prompts or the forward pass of the family change
    what they compute; ``files`` are fingerprinted beside the weights, and ``prefixes`` are of the names in
    these, as ``part_name`` takes them. ``kind`` says what comes out of the
    tower: vectors of unit length, or scores as they are. ``takes_instructions`` says whether an input may
    have one, ``lowers_case`` whether texts become lower case where that is declared, ``finds_words`` whether
    texts hold added tokens that are not special, and ``projects_tokens``
    whether modules behind the Transformer are done for each token, and ``declares_causal`` whether
    ``is_causal`` at the top of ``config.json`` is of the text tower. ``activation`` is of scores,
    ``lacking_keys`` are what files lack and the family fills in, and ``marks``
    are the control tokens around a text, and ``prompts`` stand before it, by its role. ``placeholder`` is the
    token that stands for a vision row, None for a family without images, and ``image_axes`` are the axes of
    vision rows before their width where they come straight from the vision stage. The vision tower is of
    ``vision_class``, a ``module:Class`` that needs torch, made of ``vision_config``; ``vision_part`` is what
    precedes the names of the vision tower's tensors, and ``normalisation`` each channel's mean and deviation.
    """

    family: ClassVar[str]
    version: ClassVar[int] = 2
    files: ClassVar[tuple[str, ...]] = (CONFIG_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE)
    prefixes: ClassVar[Sequence[tuple[str, str]]] = (("score.", "text.head."), ("", "text."))
    features: ClassVar[frozenset[Feature]] = frozenset(Feature)
    kind: ClassVar[OutputKind] = OutputKind.VECTOR
    takes_instructions: ClassVar[bool] = False
    lowers_case: ClassVar[bool] = False
    finds_words: ClassVar[bool] = False
    projects_tokens: ClassVar[bool] = False
    declares_causal: ClassVar[bool] = True
    activation: ScoreActivation = "sigmoid"
    lacking_keys: tuple[str, ...] = ()
    marks: Marks = Marks()
    prompts: Mapping[Role, str] = NO_PROMPTS
    placeholder: int | None = None
    image_axes: tuple[Axis, ...] = ("rows",)
    vision_class: ClassVar[str] = ""
    vision_config: object = None
    vision_part: ClassVar[str] = "vision."
    normalisation: tuple[Sequence[float], Sequence[float]] = ((), ())

    def __init__(
        self,
        path: Path,
        text: TextSpec,
        options: msgspec.Struct | None = None,
        *,
        max_tokens: int,
        dimensions: Collection[int] = (),
        declared: Declared | None = None,
        tokenizer: PlainTokenizer | None = None,
    ) -> None:
        """Apply what the checkpoint declares, which wins; raises ``CheckpointError`` for what is not done.

        ``declared`` and ``tokenizer`` are those where they have been read; the weights are not looked at.
        """
        self.path = path
        self.declared = read_declared(path) if declared is None else declared
        self.text = declared_text(
            text,
            self.declared,
            family=self.family,
            kind=self.kind,
            lower_case=self.lowers_case,
            projects=self.projects_tokens,
            causal=self.declares_causal,
        )
        self.max_tokens, self._role_tokens = longest(max_tokens, self.declared)
        self.dimensions = frozenset(width for width in dimensions if width < self.text.width)
        self._tokenizer = tokenizer or PlainTokenizer.read(
            path,
            vocab_size=text.vocab_size,
            lower_case=self.declared.lower_case,
            words=self.finds_words,
        )
        self._options = options
        side = self.declared.truncation_side or self._tokenizer.truncation_side
        self.truncation_side = Truncate.START if side == "left" else Truncate.END

    @property
    def assumed(self) -> Sequence[str]:
        """What nothing says of how inputs become outputs, see ``models.declared.assumed``."""
        prompts = self.prompts
        # A pair has none of them.
        if self.kind is OutputKind.SCORE or not isinstance(prompts, RolePrompts) or not prompts.assumed:
            return self.lacking_keys
        return (*self.lacking_keys, "prompts")

    def try_out(self) -> None:
        """Try the tokenizer in a child process; raises ``CheckpointError`` for one that ends it."""
        try_tokenizer(self._tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """Computed at the first use, from files and options; raises ``CheckpointError`` without weights."""
        options = "" if self._options is None else f" {msgspec.json.encode(self._options).decode()}"
        files = tuple(dict.fromkeys((*self.files, *self.declared.files, *self._tokenizer.files)))
        revision = f"{self.family} {self.version}{options}{self._tokenizer.changes}"
        return fingerprint(self.path, revision=revision.encode(), files=files)

    @cached_property
    def output(self) -> Output:
        scaled = self.kind is not OutputKind.SCORE
        return Output(
            kind=self.kind,
            width=self.text.width,
            unit_length=scaled,
            pooling=self.text.pooling,
            activation=self.activation,
        )

    @property
    def outputs(self) -> Sequence[Output]:
        """All outputs, the tower's own first; families with heads have further ones."""
        return (self.output,)

    @cached_property
    def chunks(self) -> Output | None:
        """The output of chunks, where the mean of all tokens' states is all that a vector is made of."""
        means = {self.text.pooling, *self.text.besides} == {"mean"}
        if self.kind is not OutputKind.VECTOR or not means:
            return None
        return replace(self.output, kind=OutputKind.TOKENS, name=CHUNKS)

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size

    @cached_property
    def _assembler(self) -> Assembler:
        return Assembler(self._tokenizer, self.placeholder)

    def segments(self, content: Content, *, param: str) -> list[Segment]:
        """The prompt of texts and images; raises ``InvalidInput`` for what the family does not take.

        Of a family that reads text alone: the role's prompt and the texts, between the marks.
        """
        return [*self.marks.before, Run(content.prompt_of(self.prompts), content.text), *self.marks.behind]

    def prompt(self, content: Content, *, max_tokens: int, truncate: Truncate, param: str) -> Prompt:
        max_tokens = min(max_tokens, self._role_tokens.get(content.role, max_tokens))
        if content.instruction is not None and not self.takes_instructions:
            refuse_instruction(content, param=param)
        if content.token_ids is not None:
            return prompt_of_ids(
                content, self.vocab_size, self.placeholder, max_tokens, truncate=truncate, param=param
            )
        if not any(content.parts):
            raise InvalidInput(f"{param} is empty: it has {self.lacking}", param=param)
        if content.images and self.placeholder is None:
            self._refuse_image(param)
        made, segments = self._assembler, self.segments(content, param=param)
        assemble = made.prompt
        if content.chunked:
            assemble = partial(made.document, chunks=self.written_texts(content, param=param))
        return assemble(segments, max_tokens=max_tokens, truncate=truncate, param=param)

    def written_texts(self, content: Content, *, param: str) -> Sequence[str]:
        """The texts of a content as ``segments`` has them; raises ``InvalidInput``."""
        return content.texts

    @property
    def lacking(self) -> str:
        """What an empty input has, in words."""
        return "no text" if self.placeholder is None else "neither text nor an image"

    def pieces(self, text: str, *, role: Role, instruction: str | None = None, param: str) -> Sequence[Piece]:
        content = Content(parts=(text,), role=role, instruction=instruction)
        if not self.takes_instructions:
            refuse_instruction(content, param=param)
        return self._assembler.pieces(self.segments(content, param=param), param=param)

    def token_text(self, token: int) -> str:
        return self._tokenizer.text_of(token)

    def vision_index(self, tokens: Int32Array) -> Int32Array:
        return np.flatnonzero(tokens == self.image_token_id).astype(np.int32)

    def positions(self, tokens: Int32Array, images: Sequence[ImagePlan]) -> Int32Array:
        return sequential(len(tokens))

    @property
    def vision(self) -> VisionSpec | None:
        return None

    def plan(self, width: int, height: int, *, param: str) -> ImagePlan:
        """Raises ``InvalidInput``."""
        self._refuse_image(param)

    def preprocess(self, picture: Picture, empty: Empty = np.empty) -> Pixels:
        """Raises ``InvalidInput``."""
        self._refuse_image(picture.param)

    def unit_positions(self, image: ImagePlan) -> Int32Array:
        """int32 ``[0, units]``: units know their places themselves."""
        return np.empty((0, image.units), np.int32)

    def vision_tower(self) -> VisionTower:
        """Build the vision tower, whose weights are read later; needs torch."""
        module, _, name = self.vision_class.partition(":")
        tower: VisionTower = getattr(import_module(module), name)(self.vision_config)
        return tower

    def vision_shapes(self) -> Shapes:
        """The tensors that the vision tower keeps, by ``vision.`` and their names there."""
        return {}

    def vision_activations(self, units: int) -> int:
        """Elements alive at the widest point of a vision batch of so many units, beside the weights."""
        return 0

    def load_vision(self, *, dtype: str, device: str, form: Form | None = None) -> VisionTower:
        """Read the vision tower's tensors; raises ``CheckpointError``, or ``ConfigError`` without a tower."""
        if self.vision is None:
            raise ConfigError(f"{self.family} reads text alone: it has no vision stage")
        from tessera.nn.loading import load_vision

        return load_vision(
            self.vision_tower,
            self.tensors(),
            part=self.vision_part,
            normalisation=self.normalisation,
            dtype=dtype,
            device=device,
            form=form,
        )

    def vision_nbytes(self, dtype: str) -> int:
        return nbytes(self.vision_shapes(), dtype)

    def vision_activation_nbytes(self, dtype: str, units: int) -> int:
        return self.vision_activations(units) * FLOATS[dtype].itemsize

    def _refuse_image(self, param: str) -> NoReturn:
        raise InvalidInput(f"{param} is an image; {self.family} reads text alone", param=param)

    def tensors(self) -> Mapping[str, StoredTensor]:
        """The place of every tensor that the model uses, the tower's by ``text.`` and its name there.

        Raises ``CheckpointError``.
        """
        return stored_tensors(self.path, self.stored_shapes(), self.stored_name)

    def stored_shapes(self) -> Shapes:
        """Every tensor that the weight files must have; raises ``CheckpointError`` where it has to look."""
        return self.vision_shapes() | self.stored_text.shapes("text.")

    @cached_property
    def stored_names(self) -> frozenset[str]:
        """The names of the tensors in the weight files; raises ``CheckpointError``."""
        files = weight_files(self.path, lambda name: False)
        return frozenset(tensor.name for file in files for tensor in file.tensors)

    def stored_name(self, name: str) -> str | None:
        """The canonical name of a tensor in weight files, None for one without use, by ``prefixes``."""
        return part_name(name, self.prefixes)

    def all_tensors(self) -> Mapping[str, StoredTensor]:
        """``tensors``, and those of the modules that the checkpoint declares; raises ``CheckpointError``."""
        return self._all_tensors

    @cached_property
    def _all_tensors(self) -> Mapping[str, StoredTensor]:
        # A worker asks some times before it loads: to decide, to count memory and for the log.
        found = dict(self.tensors())
        for number, (step, shapes) in enumerate(zip(self.text.steps, self.text.step_shapes(), strict=True)):
            if shapes:
                assert isinstance(step, Dense | LayerNorm)
                stored = stored_tensors(step.folder, shapes, lambda name: name)
                found |= {f"text.steps.{number}.{name}": tensor for name, tensor in stored.items()}
        return found

    @property
    def stored_text(self) -> TextSpec:
        """The tower as the weight files have it; families may have to look. Raises ``CheckpointError``."""
        return self.text

    def load_text(self, *, dtype: str, device: str) -> TextTower:
        """Read the tower's tensors; raises ``CheckpointError``."""
        from tessera.nn.loading import load_text

        tower = load_text(self.stored_text, self.all_tensors(), part="text.", dtype=dtype, device=device)
        return tower.give(self.output.name, {})

    @property
    def state_width(self) -> int:
        """Values of a token's hidden state."""
        return self.text.layer.hidden

    @property
    def image_token_id(self) -> int:
        """The placeholder of a vision row, -1 for a family without images."""
        return -1 if self.placeholder is None else self.placeholder

    def load_stage(
        self, stage: str, *, layout: str, dtype: str, device: str, max_sequences: int = 1024
    ) -> StageModule:
        """A part of the text stage for compilers; raises ``CheckpointError`` or ``ConfigError``."""
        if isinstance(self.text, EncoderSpec):
            # Nothing is compiled of learned positions and token types.
            raise ConfigError(
                f"family {self.family} offers no stages to compile or export; use engine: torch"
            )
        from tessera.models.text_stages import TEXT_STAGES, TextStages

        check_stage(stage, layout, TEXT_STAGES)
        stages = TextStages(model=self, dtype=dtype, device=device, max_sequences=max_sequences)
        return stages.load(stage, layout)

    def text_nbytes(self, dtype: str) -> int:
        return sum(nbytes(shapes, dtype) for shapes in (self.text.shapes(), *self.text.step_shapes()))

    def text_activation_nbytes(self, dtype: str, tokens: int) -> int:
        return self.text.activations(tokens) * FLOATS[dtype].itemsize


if TYPE_CHECKING:
    from tessera.nn.forms.plain import Form
    from tessera.nn.text import TextTower
    from tessera.nn.vision import VisionTower

    _offers_stages: type[StageFamily] = TowerModel


def nbytes(shapes: Shapes, dtype: str) -> int:
    """Bytes of tensors of these shapes."""
    return sum(map(prod, shapes.values())) * FLOATS[dtype].itemsize
