"""Vocabularies of word pieces, made of common words, their endings and single characters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final

from tessera_tools.random_checkpoint.tokenizer import ENDINGS, STEMS, added_tokens

BERT: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ROBERTA: Final = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_MARKS: Final = ".,;:!?-'\"()[]<>/&%+=*0123456789"


def word_piece(size: int) -> dict[str, Any]:
    """Return BERT's ``tokenizer.json`` with ``size`` tokens, truncation and padding as MiniLM's has them."""
    characters = _characters()
    continued = (f"##{piece}" for piece in chain(characters, _endings()))
    vocab = _numbered(chain(BERT, characters, STEMS, continued, _fillers("[unused{}]")), size)
    return {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 128, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": {"Fixed": 128},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": vocab["[PAD]"],
            "pad_type_id": 0,
            "pad_token": "[PAD]",
        },
        "added_tokens": added_tokens({name: vocab[name] for name in BERT}),
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "BertProcessing",
            "sep": ["[SEP]", vocab["[SEP]"]],
            "cls": ["[CLS]", vocab["[CLS]"]],
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocab,
        },
    }


def unigram(size: int) -> dict[str, Any]:
    """Return XLM-RoBERTa's ``tokenizer.json`` with ``size`` tokens; control tokens have the best score."""
    words = (f"▁{word}" for word in STEMS)
    named = chain(ROBERTA[:-1], ["▁"], words, _endings(), _characters(), _fillers("▁unused{}"))
    pieces = list(_numbered(named, size - 1))
    vocab = [[piece, 0.0 if rank < 4 else -2.0 - rank / 1000] for rank, piece in enumerate(pieces)]
    ids = {name: rank for rank, name in enumerate(ROBERTA[:-1])} | {ROBERTA[-1]: size - 1}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(ids, mask=ROBERTA[-1]),
        "normalizer": {"type": "NFKC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "post_processor": {
            "type": "RobertaProcessing",
            "sep": ["</s>", ids["</s>"]],
            "cls": ["<s>", ids["<s>"]],
            "trim_offsets": True,
            "add_prefix_space": True,
        },
        "decoder": metaspace,
        "model": {
            "type": "Unigram",
            "unk_id": ids["<unk>"],
            "vocab": [*vocab, [ROBERTA[-1], 0.0]],
            "byte_fallback": False,
        },
    }


def _characters() -> Sequence[str]:
    return sorted({character for word in STEMS for character in word} | set(_MARKS))


def _endings() -> Sequence[str]:
    return sorted({ending for ending in ENDINGS if len(ending) > 1})


def _fillers(pattern: str) -> Iterator[str]:
    number = 0
    while True:
        yield pattern.format(number)
        number += 1


def _numbered(pieces: Iterator[str], size: int) -> dict[str, int]:
    """Give the first ``size`` different pieces their ids, in their order."""
    ids: dict[str, int] = {}
    for piece in pieces:
        if len(ids) == size:
            return ids
        ids.setdefault(piece, len(ids))
    raise AssertionError("fillers have no end")
