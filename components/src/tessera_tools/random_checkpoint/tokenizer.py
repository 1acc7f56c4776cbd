"""Byte-level BPE tokenizers, trained on sentences made up here or given."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

_TRAINED = 2000

_COMMON = """
the of and to in is that for it as was with be by on not he this are or his from at which but have an had
they you were their one all we can her has there been if more when will would who so no about what up into
than its time only could new them some these then two first may any like now such make over our even most
state after also did many before must through back year where much your way down should because long each
just those people how too little world very own see work men here get life between show form table figure
page chart image photo scan paper report number total value price market sales water energy plant animal
mountain river city street house garden temple flower window colour light dark red green blue white black
summer winter morning night bridge train ship engine machine model vector search query answer question
passage document letter history science method result sample measure weight height temperature pressure
music paint draw write read learn teach build open close start stop move turn carry follow bring hold grow
change call point place part side hand head eye face door line word name book story king queen child friend
family school office company service system network server memory cache batch token layer attention
language translate region country island coast forest desert valley climate storm rain snow wind cloud
été où déjà être avec pour dans plus jour nuit ville maison über für auch nicht schön größe straße mañana
niño año corazón città perché così più são não também 東京 日本 中国 你好 世界 москва привет мир
"""
STEMS = tuple(_COMMON.split())
ENDINGS = ("", "", "", "", "s", "ed", "ing", "er", "ly", "ness", "ment", "able", "tion", "al")
_MARKS = (".", ".", ".", "?", "!", ";", ":", " -", ",", ")", '"', "...", "\n", "\n\n")


def byte_level_bpe(
    *,
    size: int,
    split: str,
    control: Sequence[str],
    seed: int,
    sentences: Iterable[str] | None = None,
    whole_words: bool = False,
    normalizer: normalizers.Normalizer | None = None,
) -> dict[str, Any]:
    """``tokenizer.json``: trained merges, then merges of pairs of tokens until there are ``size``.

    ``split`` is the regular expression of the pre-tokenizer; ``control`` are special tokens, whose ids begin
    at ``size``; ``sentences`` replace those that ``seed`` stands for; with ``whole_words``, a word that is in
    the vocabulary is taken without looking at merges.
    """
    if size < 300:
        raise ValueError("the vocabulary has no room for the 256 bytes")
    made = _sentences(seed) if sentences is None else tuple(sentences)
    steps = None if normalizer is None else pickle.dumps(normalizer)
    written: dict[str, Any] = json.loads(_trained(min(size, _TRAINED), split, made, whole_words, steps))
    _fill_vocabulary(written["model"], size)
    written["added_tokens"] = added_tokens({name: size + place for place, name in enumerate(control)})
    return written


@lru_cache(maxsize=32)
def _trained(
    size: int, split: str, sentences: tuple[str, ...], whole_words: bool, normalizer: bytes | None
) -> str:
    """The trained tokenizer as JSON, 50 ms, for all checkpoints of a process; the normalizer is pickled."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole_words))
    if normalizer is not None:
        tokenizer.normalizer = pickle.loads(normalizer)
    by_words = pre_tokenizers.Split(Regex(split), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([by_words, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    written: str = tokenizer.to_str()
    return written


def added_tokens(ids: Mapping[str, int], *, mask: str | None = None) -> list[dict[str, Any]]:
    """``added_tokens`` of ``tokenizer.json``; the ``mask`` takes the space before it."""
    return [
        {
            "id": number,
            "content": name,
            "single_word": False,
            "lstrip": name == mask,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for name, number in ids.items()
    ]


def template(single: Sequence[str], pair: Sequence[str], ids: Mapping[str, int]) -> dict[str, Any]:
    """The post-processor that puts special tokens around texts, which are called ``A`` and ``B``."""

    def piece(name: str) -> dict[str, Any]:
        return {"Sequence" if name in ("A", "B") else "SpecialToken": {"id": name, "type_id": 0}}

    return {
        "type": "TemplateProcessing",
        "single": list(map(piece, single)),
        "pair": list(map(piece, pair)),
        "special_tokens": {
            name: {"id": name, "ids": [number], "tokens": [name]} for name, number in ids.items()
        },
    }


def _fill_vocabulary(model: dict[str, Any], size: int) -> None:
    """Add merges of a word's beginning with a word's end, the least wanted last, up to ``size`` tokens."""
    vocabulary: dict[str, int] = model["vocab"]
    trained = list(vocabulary)
    heads = [token for token in trained if len(token) > 2 and token.startswith("Ġ")]
    tails = [token for token in trained if len(token) > 1 and token.isalpha() and "Ġ" not in token]
    for head in heads:
        for tail in tails:
            if len(vocabulary) >= size:
                return
            if head + tail not in vocabulary:
                vocabulary[head + tail] = len(vocabulary)
                model["merges"].append([head, tail])
    if len(vocabulary) < size:
        raise ValueError(f"only {len(vocabulary)} of {size} tokens could be made")


@lru_cache(maxsize=4)
def _sentences(seed: int) -> tuple[str, ...]:
    """Sentences of common stems with endings, frequent words first, with some numbers among them."""
    source = random.Random(seed)
    made = []
    for _ in range(6000):
        words = []
        for _ in range(source.randint(4, 14)):
            rank = int(len(STEMS) * source.random() ** 2)
            word = STEMS[rank] + source.choice(ENDINGS)
            if source.random() < 0.05:
                word = str(source.randint(0, 9999))
            words.append(word.capitalize() if source.random() < 0.1 else word)
        made.append(" ".join(words) + source.choice(_MARKS))
    return tuple(made)
