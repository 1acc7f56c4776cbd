"""Training data: chunks of pictures with the prompts about them, each a function of its seed and number."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import Dataset

from tessera.image_plan import ImagePlan
from tessera.imaging import Picture, decode
from tessera.models.base import Content, Int32Array, Part, Role, Truncate
from tessera.models.llama_nemotron_vl.images import cut
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from training.render.canvas import ANY, ONE_TILE, Canvases
from training.render.picture import as_jpeg, draw, half_size, kept
from training.world.compositions import Composition, Page, written
from training.world.grammar import ask, ask_for, describe, pick_words
from training.world.notes import add, sample_note, write
from training.world.sampling import SHARES, neighbour, sample, sample_simple, shares_with
from training.world.words import WORDS

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_NEIGHBOURS = 0.2
"""Share of a chunk's pictures that differ from another one in it in a single respect."""
_ROLES = ((Role.QUERY, Role.PASSAGE, Role.NONE), (0.7, 0.15, 0.15))
_IMAGE_ROLES = ((Role.PASSAGE, Role.QUERY), (0.75, 0.25))
_PARTIAL = 0.35
"""Share of the queries that tell only some of what the picture holds."""

_WORDS_A_QUERY = 3
"""A page has one query for some of its words for each so many words on it: short queries for long pages are
the hardest to answer, and cost next to nothing beside the picture."""

SIDES = ("images", "queries", "captions", "documents", "narrowed", "words", "views")

_NUMBERS = {word: number for number, word in enumerate(WORDS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """One set of prompts about a chunk, packed: ``SIDES`` one after another, ``sizes`` sequences each.

    An image, its query and its caption share their place within their sides, and so do a document of
    image and note and the query narrowed down to it. ``tiles`` int64 are indices into the chunk's tiles.
    The queries for some of a page's words, ``words``, have theirs in ``owners`` int64, the number of the
    page's image among ``images``; ``asked`` bool ``[words, WORDS]`` is what each one asks for. ``views`` are
    some of the images again, resized: ``originals`` int64 ``[views]`` says which.

    Arrays, since every tensor that a worker sends holds a file open for as long as it lives.
    """

    ids: Int32Array
    lengths: list[int]
    tiles: Int64Array
    sizes: dict[str, int]
    owners: Int64Array
    asked: BoolArray
    originals: Int64Array


@dataclass(slots=True, kw_only=True)
class Chunk:
    """``tiles`` uint8 ``[n, 3, size, size]`` of all pictures and views, and one set of prompts for each use.

    ``written`` bool ``[pictures, WORDS]`` is what can be read on each picture.
    """

    number: int
    tiles: torch.Tensor
    prompts: list[Prompts]
    written: BoolArray
    used: int = 0

    def pin_memory(self) -> Chunk:
        """Called by the data loader, so that the tiles travel while the device computes."""
        self.tiles = self.tiles.pin_memory()
        return self


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How chunks are made; ``settings`` is a directory with configuration and tokenizer.

    The ``simple`` first chunks hold pictures of one tile with few words: they cost a third of the others,
    and reading begins sooner with them. ``pages`` is the share of pages among the pictures of the others.
    ``views`` is the share of those pictures that are there a second time, smaller, and have to be recognised;
    held-out pictures all are, at half size.
    """

    settings: Path
    seed: int
    size: int = 128
    uses: int = 3
    held_out: bool = False
    simple: int = 0
    pages: float = SHARES["page"]
    views: float = 0.0


@dataclass(frozen=True)
class Chunks(Dataset[Chunk]):
    """Makes any chunk by its number."""

    recipe: Recipe
    _opened: dict[str, LlamaNemotronVL] = field(default_factory=dict, repr=False)

    @cached_property
    def model(self) -> LlamaNemotronVL:
        """The served code that tiles and builds prompts; opened in the process that uses it."""
        return LlamaNemotronVL(self.recipe.settings)

    def __getitem__(self, number: int) -> Chunk:
        recipe = self.recipe
        source = random.Random(f"{recipe.seed} {recipe.held_out} {number}")
        simple = number < recipe.simple
        compositions = self._compositions(source, simple)
        canvases = ONE_TILE if simple else ANY
        pictures = [self._picture(composition, source, canvases) for composition in compositions]
        # Of its own source: with and without views a chunk has the same pictures and the same prompts.
        views = {} if simple else self._views(pictures, random.Random(f"views {recipe.seed} {number}"))
        tiles = [
            cut(Picture.of(picture, param="picture"), self.model.config.image)
            for picture in (*pictures, *views.values())
        ]
        starts = np.cumsum([0, *(len(cut_) for cut_ in tiles)])
        spans = [np.arange(start, stop) for start, stop in pairwise(starts)]
        again = dict(zip(views, spans[len(pictures) :], strict=True))
        shown = spans[: len(pictures)]
        if recipe.held_out:
            prompts = [self._asked(compositions, shown, again, source, partial=0.0)]
        else:
            prompts = [
                self._asked(compositions, shown, again, source, partial=_PARTIAL) for _ in range(recipe.uses)
            ]
        return Chunk(
            number=number,
            tiles=torch.from_numpy(np.concatenate(tiles)),
            prompts=prompts,
            written=_marked([written(composition) for composition in compositions]),
        )

    def _compositions(self, source: random.Random, simple: bool) -> list[Composition]:
        recipe = self.recipe
        near = 0 if recipe.held_out else round(recipe.size * _NEIGHBOURS)
        if simple:
            found = [sample_simple(source) for _ in range(recipe.size - near)]
        else:
            shares = SHARES if recipe.held_out else shares_with(recipe.pages)
            found = [
                sample(source, held_out=recipe.held_out, shares=shares) for _ in range(recipe.size - near)
            ]
        return found + [neighbour(composition, source) for composition in found[:near]]

    def _picture(self, composition: Composition, source: random.Random, canvases: Canvases) -> Image.Image:
        picture = draw(composition, source, canvases)
        return _through_jpeg(picture, source) if source.random() < 0.6 else picture

    def _views(self, pictures: Sequence[Image.Image], source: random.Random) -> dict[int, Image.Image]:
        """Some of the pictures, by their numbers, as they come out of being made smaller."""
        if self.recipe.held_out:
            return {number: half_size(picture) for number, picture in enumerate(pictures)}
        views = {}
        for number in sorted(source.sample(range(len(pictures)), round(self.recipe.views * len(pictures)))):
            smaller = kept(pictures[number], source)
            views[number] = _through_jpeg(smaller, source) if source.random() < 0.3 else smaller
        return views

    def _asked(
        self,
        compositions: Sequence[Composition],
        spans: Sequence[np.ndarray],
        views: Mapping[int, np.ndarray],
        source: random.Random,
        *,
        partial: float,
    ) -> Prompts:
        packed = _Packing(self.model)
        held_out = self.recipe.held_out
        for span in spans:
            packed.add("images", "", Role.PASSAGE if held_out else _drawn(_IMAGE_ROLES, source), span)
        for composition in compositions:
            query = _query(composition, source, partial)
            packed.add("queries", query, Role.QUERY if held_out else _drawn(_ROLES, source))
        for composition in compositions:
            packed.add("captions", describe(composition, source), Role.PASSAGE)
        # Two pictures and two notes make four documents: neither part alone tells which one is meant.
        chosen = source.sample(range(len(spans)), len(spans) // 8 * 2)
        combined = [
            (image, note)
            for one, other in zip(chosen[::2], chosen[1::2], strict=True)
            for notes in [(sample_note(source), sample_note(source))]
            for image in (one, other)
            for note in notes
        ]
        for image, note in combined:
            packed.add("documents", write(note, source), Role.PASSAGE, spans[image])
        for image, note in combined:
            query = add(_query(compositions[image], source, partial), note, source)
            packed.add("narrowed", query, Role.QUERY)
        for number, composition in enumerate(compositions):
            if not isinstance(composition, Page):
                continue
            for _ in range(1 if held_out else -(-len(composition.words) // _WORDS_A_QUERY)):
                picked = pick_words(composition, source)
                role = Role.QUERY if held_out else _drawn(_ROLES, source)
                packed.add_words(number, picked, ask_for(picked, source), role)
        for span in views.values():
            packed.add("views", "", Role.PASSAGE, span)
        return packed.finish(originals=list(views))


class _Packing:
    """Collects prompts side by side."""

    def __init__(self, model: LlamaNemotronVL) -> None:
        self._model = model
        self._ids: list[Int32Array] = []
        self._tiles: list[np.ndarray] = []
        self._sizes = dict.fromkeys(SIDES, 0)
        self._owners: list[int] = []
        self._asked: list[Sequence[str]] = []

    def add(self, side: str, text: str, role: Role, span: np.ndarray | None = None) -> None:
        parts: list[Part] = []
        if span is not None:
            parts.append(ImagePlan(units=len(span), rows=len(span) * self._model.config.tokens_per_tile))
        if text or span is None:
            parts.append(text)
        content = Content(parts=tuple(parts), role=role)
        prompt = self._model.prompt(
            content, max_tokens=self._model.max_tokens, truncate=Truncate.NONE, param=side
        )
        self._ids.append(prompt.tokens)
        self._sizes[side] += 1
        if span is not None:
            self._tiles.append(span)

    def add_words(self, owner: int, picked: Sequence[str], query: str, role: Role) -> None:
        self.add("words", query, role)
        self._owners.append(owner)
        self._asked.append(picked)

    def finish(self, *, originals: Sequence[int]) -> Prompts:
        return Prompts(
            ids=np.concatenate(self._ids),
            lengths=[len(ids) for ids in self._ids],
            tiles=np.concatenate(self._tiles),
            sizes=self._sizes,
            owners=np.array(self._owners, dtype=np.int64),
            asked=_marked(self._asked),
            originals=np.array(originals, dtype=np.int64),
        )


def _through_jpeg(picture: Image.Image, source: random.Random) -> Image.Image:
    return decode(as_jpeg(picture, source.randint(35, 95)), param="picture")


def _query(composition: Composition, source: random.Random, partial: float) -> str:
    if source.random() >= partial:
        return describe(composition, source)
    return ask(composition, source)


def _marked(texts: Sequence[Collection[str]]) -> BoolArray:
    """Bool ``[texts, WORDS]``, true where a text has the word."""
    marks = np.zeros((len(texts), len(WORDS)), dtype=np.bool_)
    for row, words in zip(marks, texts, strict=True):
        row[[_NUMBERS[word] for word in words]] = True
    return marks


def _drawn(choices: tuple[tuple[Role, ...], tuple[float, ...]], source: random.Random) -> Role:
    return source.choices(*choices)[0]
