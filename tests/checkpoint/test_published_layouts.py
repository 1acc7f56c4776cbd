"""The layouts in which much served models are published are what their tokenizers' classes make."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tessera.checkpoint.tokenizer_class import replaced

BERT: Final = {
    "normalizer": {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": True,
    },
    "pre_tokenizer": {"type": "BertPreTokenizer"},
    "model": {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
    },
}
OF_BERT: Final = {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}
METASPACE: Final = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
OLD_METASPACE: Final = {"type": "Metaspace", "replacement": "▁", "str_rep": "▁", "add_prefix_space": True}
CHARSMAP: Final = {"type": "Precompiled", "precompiled_charsmap": ""}
SPACES: Final = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
UNIGRAM: Final = {"type": "Unigram", "unk_id": 3}
BPE: Final = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": "",
    "end_of_word_suffix": "",
    "fuse_unk": False,
}
BYTES: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
QWEN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
CLIP: Final = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def cut(*parts: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [*parts]}


def split(pattern: str, behavior: str, *, invert: bool) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


def normal(*parts: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [*parts]}


def pieces(normalizer: Any, cuts: Any) -> dict[str, Any]:
    return {"normalizer": normalizer, "pre_tokenizer": cuts, "model": UNIGRAM}


LAYOUTS: Final[Mapping[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "MiniLM, BGE, E5, GTE, mxbai, arctic-m": ("bert", {"tokenizer_class": "BertTokenizer", **OF_BERT}, BERT),
    "nomic": ("nomic_bert", {"tokenizer_class": "BertTokenizer", **OF_BERT}, BERT),
    "without a class": ("bert", OF_BERT, BERT),
    "mpnet": ("mpnet", {"tokenizer_class": "MPNetTokenizer", **OF_BERT}, BERT),
    "multilingual E5, jina v3": (
        "xlm-roberta",
        {"tokenizer_class": "XLMRobertaTokenizer"},
        pieces(CHARSMAP, cut({"type": "WhitespaceSplit"}, OLD_METASPACE)),
    ),
    "multilingual E5 small": (
        "bert",
        {"tokenizer_class": "XLMRobertaTokenizer", "add_prefix_space": True},
        pieces(CHARSMAP, cut({"type": "WhitespaceSplit"}, METASPACE)),
    ),
    "BGE M3": (
        "xlm-roberta",
        {"tokenizer_class": "XLMRobertaTokenizer"},
        pieces(normal(CHARSMAP, SPACES), OLD_METASPACE),
    ),
    "arctic-l, GTE multilingual": (
        "xlm-roberta",
        {"tokenizer_class": "XLMRobertaTokenizerFast", "add_prefix_space": None},
        pieces(
            normal(CHARSMAP, {"type": "Strip", "strip_left": False, "strip_right": True}, SPACES), METASPACE
        ),
    ),
    "multilingual MiniLM": (
        "bert",
        {"do_lower_case": True},
        pieces(CHARSMAP, cut({"type": "WhitespaceSplit"}, OLD_METASPACE)),
    ),
    "distilroberta": (
        "roberta",
        {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": False},
        {"normalizer": None, "pre_tokenizer": BYTES, "model": BPE},
    ),
    "Qwen3-Embedding": (
        "qwen3",
        {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": False},
        {
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": cut(split(QWEN, "Isolated", invert=False), {**BYTES, "use_regex": False}),
            "model": BPE | {"byte_fallback": False, "ignore_merges": False},
        },
    ),
    "CLIP": (
        "clip",
        {"tokenizer_class": "CLIPTokenizer", "add_prefix_space": False, "do_lower_case": True},
        {
            "normalizer": normal(
                {"type": "NFC"},
                {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
                {"type": "Lowercase"},
            ),
            "pre_tokenizer": cut(split(CLIP, "Removed", invert=True), BYTES),
            "model": BPE | {"unk_token": "<|endoftext|>", "end_of_word_suffix": "</w>"},
        },
    ),
    "SigLIP": ("siglip", {"tokenizer_class": "SiglipTokenizer"}, pieces(CHARSMAP, METASPACE)),
    "SigLIP 2": ("siglip2", {"tokenizer_class": "GemmaTokenizer"}, pieces(None, None)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_published_layout_is_refused(name: str, tmp_path: Path) -> None:
    model_type, settings, values = LAYOUTS[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    changed = replaced(tmp_path, values, "[UNK]")
    # Pieces are split at white space alone, and nothing else differs from the class's own.
    split_too = settings.get("tokenizer_class", "").startswith("XLM") and (
        values["pre_tokenizer"]["type"] == "Metaspace"
    )
    assert set(changed) == ({"pre_tokenizer"} if split_too else set())
