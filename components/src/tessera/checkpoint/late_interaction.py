"""Reads what a checkpoint of ColBERT's kind declares of its queries and documents; torch-free.

There are three forms: ``artifact.metadata`` of Stanford's ColBERT, keys that PyLate writes in
``config_sentence_transformers.json``, and files of the modules of ``MultiVectorEncoder`` in
``sentence-transformers`` 6.2.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.checkpoint.declared import (
    MODULES_FILE,
    PROMPTS_FILE,
    STANFORD_FILE,
    Declared,
)
from tessera.checkpoint.section import Section
from tessera.checkpoint.transformer import transformer_section
from tessera.errors import CheckpointError

# Lengths in tokens where a form does not declare them. PyLate's documents of Stanford's form have 180, too.
_QUERY_LENGTH: Final = 32
_DOCUMENT_LENGTH: Final = 180
_STANFORD_WIDTH: Final = 128
# A first token, a marker, a token of the text and a last one.
_LEAST_LENGTH: Final = 4
_PUNCTUATION: Final = tuple(string.punctuation)
_PYLATE_KEYS: Final = (
    "query_prefix",
    "document_prefix",
    "query_length",
    "document_length",
    "attend_to_expansion_tokens",
    "skiplist_words",
    "do_query_expansion",
)
_EXPANSION_KEYS: Final = frozenset({"strategy", "attend", "token", "length"})
_SIDES: Final = ("query", "document")


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """How a query or a document begins, and how long it may be.

    ``marker`` is the name of the token behind the first one; empty for none, None where the beginning of
    ``prompt`` may be one. ``prompt`` stands before the text. ``length`` counts all tokens, None where the
    form does not say.
    """

    marker: str | None
    prompt: str
    length: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """Queries that are shorter than ``length`` get tokens behind their last one, up to that.

    ``attended`` says whether others attend to these tokens, which attend themselves and have rows in any
    case. ``token`` is their name, None for the mask token.
    """

    length: int
    attended: bool
    token: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LateInteraction:
    """What both sides are, and whose rows are left out.

    Tokens of the ``skiplist`` have no row in the sides of ``skips``. ``width`` is that of the projection in
    the weights themselves, None where modules project. ``unit_length`` says that rows are normalised.
    """

    query: Side
    document: Side
    expansion: Expansion | None
    skiplist: Sequence[str] = ()
    skips: Sequence[str] = ("document",)
    width: int | None = None
    unit_length: bool = True


def read_late_interaction(declared: Declared) -> LateInteraction:
    """Read the form that a checkpoint has; raises ``CheckpointError`` for what is not done."""
    directory = declared.directory
    if not declared.modules:
        return _read_stanford(directory)
    general = Section.read(directory / PROMPTS_FILE, optional=True)
    if declared.similarity == "meanmaxsim":
        raise general.error("similarity_fn_name", "is meanmaxsim, and scores are sums, those of maxsim")
    own = general.string("model_type", "ColBERT") == "ColBERT" or any(map(general.has, _PYLATE_KEYS))
    if own and declared.mask is None:
        if not declared.dense:
            raise CheckpointError(f"{directory / MODULES_FILE}: has no Dense, so there are no token vectors")
        return _read_pylate(general, declared.prompts)
    return _read_multi_vector(declared)


def _read_stanford(directory: Path) -> LateInteraction:
    """Read ``artifact.metadata``, which may be missing."""
    metadata = Section.read(directory / STANFORD_FILE, optional=True)
    # Of another measure than the dot product of rows of length 1.
    metadata.string("similarity", "cosine", among=("cosine",))
    length = _length(metadata, "query_maxlen", _QUERY_LENGTH)
    return LateInteraction(
        query=Side(marker=metadata.string("query_token_id", "[unused0]"), prompt="", length=length),
        document=Side(
            marker=metadata.string("doc_token_id", "[unused1]"),
            prompt="",
            length=_length(metadata, "doc_maxlen", _DOCUMENT_LENGTH),
        ),
        expansion=Expansion(length=length, attended=metadata.flag("attend_to_mask_tokens", False)),
        skiplist=_PUNCTUATION if metadata.flag("mask_punctuation", True) else (),
        width=metadata.integer("dim", _STANFORD_WIDTH),
    )


def _read_pylate(general: Section, prompts: Mapping[str, str]) -> LateInteraction:
    length = _length(general, "query_length", _QUERY_LENGTH)
    expansion = None
    if general.flag("do_query_expansion", True):
        attended = general.flag("attend_to_expansion_tokens", False)
        expansion = Expansion(length=length, attended=attended)
    words = _words(general, "skiplist_words")
    return LateInteraction(
        query=_marked(general, "query", "[Q] ", length, prompts),
        document=_marked(
            general, "document", "[D] ", _length(general, "document_length", _DOCUMENT_LENGTH), prompts
        ),
        expansion=expansion,
        skiplist=_PUNCTUATION if words is None else words,
    )


def _marked(general: Section, side: str, marker: str, length: int, prompts: Mapping[str, str]) -> Side:
    """Return a side of PyLate, whose prompt may repeat the marker."""
    # An empty one is none.
    marker = general.string(f"{side}_prefix", marker)
    prompt = prompts.get(side, "")
    return Side(marker=marker, prompt=prompt.removeprefix(marker), length=length)


def _read_multi_vector(declared: Declared) -> LateInteraction:
    transformer, prompts = transformer_section(declared.transformer), declared.prompts
    expansion, query_length = _expansion(transformer)
    if expansion is not None and declared.mask is None:
        raise transformer.error("query_expansion", "needs a MultiVectorMask among the modules")
    words: Sequence[str] = ()
    skips: Sequence[str] = ("document",)
    if declared.mask is not None:
        mask = Section.read(declared.mask)
        if mask.has("keep_only_token_ids"):
            raise mask.error("keep_only_token_ids", "is not supported")
        words = _words(mask, "skiplist_words") or ()
        tasks = _words(mask, "skiplist_tasks")
        skips = skips if tasks is None else tasks
        if not set(skips) <= set(_SIDES):
            raise mask.error("skiplist_tasks", f"must be of {list(_SIDES)}, not {list(skips)}")
    return LateInteraction(
        query=Side(marker=None, prompt=prompts.get("query", ""), length=query_length),
        document=Side(
            marker=None,
            prompt=prompts.get("document", ""),
            length=_optional_length(transformer, "document_length"),
        ),
        expansion=expansion,
        skiplist=words,
        skips=skips,
        unit_length=bool(declared.normalize),
    )


def _expansion(transformer: Section) -> tuple[Expansion | None, int | None]:
    """Return the expansion, and the longest query: with ``fixed`` as long as that."""
    longest = _optional_length(transformer, "query_length")
    if not transformer.has("query_expansion"):
        return None, longest
    section = transformer.section("query_expansion")
    if unknown := sorted(section.values.keys() - _EXPANSION_KEYS):
        raise section.error(unknown[0], f"is unknown; the keys are {sorted(_EXPANSION_KEYS)}")
    expansion = Expansion(
        length=section.integer("length", at_least=_LEAST_LENGTH),
        attended=section.flag("attend", False),
        token=section.string("token") if section.has("token") else None,
    )
    if section.string("strategy", among=("fixed", "min")) == "fixed":
        return expansion, expansion.length
    return expansion, None if longest is None else max(longest, expansion.length)


def _length(section: Section, key: str, default: int) -> int:
    return section.integer(key, default, at_least=_LEAST_LENGTH)


def _optional_length(section: Section, key: str) -> int | None:
    return section.integer(key, at_least=_LEAST_LENGTH) if section.has(key) else None


def _words(section: Section, key: str) -> tuple[str, ...] | None:
    """Return a list of strings, or a single one; None where there is none."""
    if not section.has(key):
        return None
    value = section.values[key]
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise section.error(key, f"must be a list of strings, not {value!r}")
    return tuple(words)
