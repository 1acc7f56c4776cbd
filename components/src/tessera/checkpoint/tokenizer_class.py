"""The class of a checkpoint's tokenizer, and what it makes itself whatever ``tokenizer.json`` says.

Most classes of ``transformers`` 5 take little but the vocabulary from that file, and make the normaliser, the
pre-tokeniser and the model's settings anew. Those of 4.57 took the file as it is. Where file and class agree,
nothing follows. What 4.57 replaced, too, is replaced here, and any other difference is refused: which of the
two a model was trained with, no file says. Except for a vocabulary of another kind than the class has: no
text could have been read with the two together, and the file is taken as it is. So are XLM-RoBERTa's pieces
of which multilingual MiniLM's files say that BERT's class reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tessera.checkpoint.section import CONFIG_FILE, Section, short
from tessera.errors import CheckpointError

TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"

BERT_CLASSES: Final = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer")
"""The classes of BERT's kind, without ``Fast``."""

_BERT_PARTS: Final = frozenset((*BERT_CLASSES, "MPNetTokenizer"))
_CLASS_OF_MODEL: Final = {
    "bert": "BertTokenizer",
    "distilbert": "DistilBertTokenizer",
    "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "camembert": "CamembertTokenizer",
    "clip": "CLIPTokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_vl": "Qwen2Tokenizer",
}
# Of these types transformers takes the file as it is, whatever class is named, and of SigLIP's the family
# does what the class does.
_AS_WRITTEN: Final = frozenset({"ministral3", "mistral3", "siglip", "siglip2"})

Wanted = Mapping[str, Sequence[object]]
"""A part of a tokenizer: the values that each key may have, None for null and an absent key."""

_BYTES: Final[Wanted] = {"type": ["ByteLevel"], "use_regex": [True, None]}
_QWEN_SPLIT: Final[Wanted] = {
    "type": ["Split"],
    "pattern": [
        {
            "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
            r"\s*[\r\n]+|\s+(?!\S)|\s+"
        }
    ],
    "behavior": ["Isolated"],
    "invert": [False],
}
_CLIP_WORDS: Final = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_CLIP_SPLIT: Final[Wanted] = {
    "type": ["Split"],
    "pattern": [
        {"Regex": _CLIP_WORDS},
        {"Regex": rf"<\|startoftext\|>|<\|endoftext\|>|{_CLIP_WORDS}"},
    ],
    "behavior": ["Removed"],
    "invert": [True],
}
_CLIP_SPACES: Final[Wanted] = {"type": ["Replace"], "pattern": [{"Regex": r"\s+"}], "content": [" "]}
_WORD_PIECE: Final[Wanted] = {
    "type": ["WordPiece"],
    "continuing_subword_prefix": ["##", None],
    "max_input_chars_per_word": [100, None],
}
_BPE: Final[Wanted] = {
    "type": ["BPE"],
    "dropout": [None],
    "continuing_subword_prefix": ["", None],
    "end_of_word_suffix": ["", None],
    "byte_fallback": [False, None],
    "ignore_merges": [False, None],
}
_UNIGRAM: Final[Wanted] = {"type": ["Unigram"], "byte_fallback": [False, None]}


# What pieces of SentencePiece are made of in files; behind a split at white space the others change nothing.
_PIECES_NORMALIZERS: Final[Sequence[Wanted]] = (
    {"type": ["Precompiled"]},
    {"type": ["Strip"]},
    {"type": ["Replace"], "pattern": [{"Regex": " {2,}"}], "content": [" ", "▁"]},
)
_SPLIT_AT_SPACES: Final = {"type": "WhitespaceSplit"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """What a class makes: all of these normalisers, or any of those with ``any_normalizers``."""

    model: Wanted
    normalizers: Sequence[Wanted] = ()
    any_normalizers: bool = False
    pre_tokenizers: Sequence[Wanted]


_PIECES: Final = _Made(
    model=_UNIGRAM,
    normalizers=_PIECES_NORMALIZERS,
    any_normalizers=True,
    pre_tokenizers=(
        {"type": ["WhitespaceSplit"]},
        {"type": ["Metaspace"], "replacement": ["▁"], "prepend_scheme": ["always", None]},
    ),
)
_ROBERTA: Final = _Made(model=_BPE, pre_tokenizers=(_BYTES,))
_MADE: Final[Mapping[str, _Made]] = {
    **dict.fromkeys(
        sorted(_BERT_PARTS),
        _Made(
            model=_WORD_PIECE,
            normalizers=({"type": ["BertNormalizer"], "clean_text": [True]},),
            pre_tokenizers=({"type": ["BertPreTokenizer"]},),
        ),
    ),
    "RobertaTokenizer": _ROBERTA,
    "XLMRobertaTokenizer": _PIECES,
    "CamembertTokenizer": _PIECES,
    "Qwen2Tokenizer": _Made(
        model=_BPE,
        normalizers=({"type": ["NFC"]},),
        pre_tokenizers=(_QWEN_SPLIT, {"type": ["ByteLevel"], "use_regex": [False]}),
    ),
    "CLIPTokenizer": _Made(
        model={**_BPE, "end_of_word_suffix": ["</w>"]},
        normalizers=({"type": ["NFC"]}, _CLIP_SPACES, {"type": ["Lowercase"]}),
        pre_tokenizers=(_CLIP_SPLIT, _BYTES),
    ),
}
MADE_CLASSES: Final = tuple(_MADE)
"""The classes that are compared with a file."""
OTHER_CLASSES: Final = frozenset(
    f"{name}Tokenizer"
    for name in (
        *("Albert", "Barthez", "BigBird", "Blenderbot", "CodeGen", "CodeLlama", "Cohere", "Deberta"),
        *("DebertaV2", "Esmc", "FNet", "Funnel", "GPT2", "GPTNeoX", "Gemma", "Herbert", "Lasr", "LayoutLMv2"),
        *("LayoutLMv3", "LayoutXLM", "Llama", "Luke", "MBart", "MBart50", "MLuke", "MarkupLM", "Nllb"),
        *("Nougat", "OpenAIGPT", "Pegasus", "Qwen3_5", "Reformer", "RemBert", "RoFormer", "SeamlessM4T"),
        *("Siglip2", "Splinter", "T5", "Tipsv2", "Udop", "VideoPrism", "Whisper", "XGLM", "XLNet"),
        *("Cpm", "Bart", "Longformer", "Mvp", "LED"),
    )
)
"""Classes of transformers 5 that make their parts themselves, too, and are not compared with a file."""


def tokenizer_class(directory: Path) -> str:
    """Return the class of the tokenizer without ``Fast``, by its own settings or by the model's type.

    Empty where neither says it; raises ``CheckpointError``.
    """
    settings = Section.read(directory / TOKENIZER_CONFIG_FILE, optional=True)
    config = Section.read(directory / CONFIG_FILE, optional=True)
    of_model = _CLASS_OF_MODEL.get(config.string("model_type", ""), "")
    name = settings.string("tokenizer_class", config.string("tokenizer_class", of_model))
    return name.removesuffix("Fast")


def replaced(directory: Path, values: Mapping[str, Any], unknown: str) -> dict[str, dict[str, Any]]:
    """Return the values of parts of a ``tokenizer.json`` that the class of the tokenizer replaces.

    A part that has a ``type`` is a whole one. ``values`` are the file's, with the model's ``type``, and
    ``unknown`` is the token of what is in no vocabulary, as the checkpoint names it. Raises
    ``CheckpointError`` naming the class for parts that the class would make otherwise.
    """
    settings = Section.read(directory / TOKENIZER_CONFIG_FILE, optional=True)
    name = tokenizer_class(directory)
    config = Section.read(directory / CONFIG_FILE, optional=True)
    made = _MADE.get(name)
    another_kind = made is not None and values["model"].get("type") not in made.model["type"]
    if another_kind or config.string("model_type", "") in _AS_WRITTEN:
        return {}
    _check(name, values, settings, unknown)
    part, declared = "", {}
    if name in _BERT_PARTS:
        part = "normalizer"
        declared = {
            "lowercase": settings.flag("do_lower_case", True),
            "strip_accents": settings.flag("strip_accents") if settings.has("strip_accents") else None,
            "handle_chinese_chars": settings.flag("tokenize_chinese_chars", True),
        }
    elif name == "RobertaTokenizer":
        part, declared = "pre_tokenizer", {"add_prefix_space": settings.flag("add_prefix_space", False)}
    elif made is _PIECES and values["pre_tokenizer"]["type"] == "Metaspace":
        # Two spaces, or one at the end, would be tokens.
        split = [_SPLIT_AT_SPACES, values["pre_tokenizer"]]
        return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": split}}
    if not declared:
        return {}
    (given,) = _parts(values, part)
    changed = {key: value for key, value in declared.items() if given.get(key) != value}
    if changed and values[part]["type"] == "Sequence":
        changed = {**given, **changed}
    return {part: changed} if changed else {}


def _check(name: str, values: Mapping[str, Any], settings: Section, unknown: str) -> None:
    """Raise ``CheckpointError`` for parts of a ``tokenizer.json`` that the class would make otherwise."""
    made = _MADE.get(name)
    if made is None:
        byte_level = any(part.get("type") == "ByteLevel" for part in _parts(values, "pre_tokenizer"))
        if name in OTHER_CLASSES and not (name == "LlamaTokenizer" and byte_level):
            raise _refusal(settings, name, "parts")
        return
    model = values["model"]
    unknown_too = made.model is _WORD_PIECE and model.get("unk_token") != unknown
    if not _is(model, made.model) or unknown_too:
        raise _refusal(settings, name, "model")
    normalizers = _parts(values, "normalizer")
    if made.any_normalizers:
        fits = all(any(_is(part, wanted) for wanted in made.normalizers) for part in normalizers)
    else:
        fits = _are(normalizers, made.normalizers)
    if not fits:
        raise _refusal(settings, name, "normalizer")
    cuts = _parts(values, "pre_tokenizer")
    if made is _PIECES and [part.get("type") for part in cuts] == ["Metaspace"]:
        cuts = [_SPLIT_AT_SPACES, *cuts]
    spaced = settings.flag("add_prefix_space", made is _PIECES)
    # Of RoBERTa's class it is replaced.
    agrees = made is _ROBERTA or all(
        part.get("add_prefix_space", spaced) == spaced for part in cuts if part.get("type") in _SPACED
    )
    if not _are(cuts, made.pre_tokenizers) or not agrees:
        raise _refusal(settings, name, "pre_tokenizer")


_SPACED: Final = ("ByteLevel", "Metaspace")


def _parts(values: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Return a part of a tokenizer, or those of a sequence one by one."""
    return list(_flat(values.get(key)))


def _flat(part: Any) -> Iterator[Mapping[str, Any]]:
    if not isinstance(part, dict):
        return
    if part.get("type") != "Sequence":
        yield part
        return
    inner = part.get("normalizers") or part.get("pretokenizers")
    for each in inner if isinstance(inner, list) else ():
        yield from _flat(each)


def _is(part: Mapping[str, Any], wanted: Wanted) -> bool:
    return all(part.get(key) in values for key, values in wanted.items())


def _are(parts: Sequence[Mapping[str, Any]], wanted: Sequence[Wanted]) -> bool:
    return len(parts) == len(wanted) and all(map(_is, parts, wanted))


def _refusal(settings: Section, name: str, part: str) -> CheckpointError:
    return settings.error(
        "tokenizer_class",
        f"is {short(name)}, which makes another {part} than tokenizer.json has; PreTrainedTokenizerFast takes"
        " the file as it is",
    )
