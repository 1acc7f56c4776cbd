"""A byte-level BPE tokenizer in the layout of Llama 3's, trained on sentences made up here or given."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tessera.tools.random_checkpoint.spec import CheckpointSpec

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
_IMAGE = (
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "<|im_end|>",
    "<quad>",
    "</quad>",
    "<ref>",
    "</ref>",
    "<box>",
    "</box>",
)
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
_STEMS = tuple(_COMMON.split())
_ENDINGS = ("", "", "", "", "s", "ed", "ing", "er", "ly", "ness", "ment", "able", "tion", "al")
_MARKS = (".", ".", ".", "?", "!", ";", ":", " -", ",", ")", '"', "...", "\n", "\n\n")


def tokenizer_json(spec: CheckpointSpec, seed: int, sentences: Iterable[str] | None = None) -> dict[str, Any]:
    """``tokenizer.json``: trained merges, then merges of pairs of tokens until the vocabulary is full.

    ``sentences`` replace those that ``seed`` stands for.
    """
    if spec.base_vocab < 300 or spec.control_tokens < len(_CONTROL):
        raise ValueError("the vocabulary has no room for the 256 bytes and the control tokens")
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    split = pre_tokenizers.Split(Regex(_SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(spec.base_vocab, _TRAINED),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences or _sentences(random.Random(seed)), trainer)
    written: dict[str, Any] = json.loads(tokenizer.to_str())
    _fill_vocabulary(written["model"], spec.base_vocab)
    names = (*_control_names(spec.control_tokens), *_IMAGE)
    tokens = [AddedToken(name, special=True, normalized=False) for name in names]
    written["added_tokens"] = [
        {
            "id": spec.base_vocab + position,
            "content": token.content,
            "single_word": token.single_word,
            "lstrip": token.lstrip,
            "rstrip": token.rstrip,
            "normalized": token.normalized,
            "special": token.special,
        }
        for position, token in enumerate(tokens)
    ]
    written["post_processor"] = _begin_with(_CONTROL[0], spec.base_vocab)
    return written


def tokenizer_config_json(spec: CheckpointSpec) -> dict[str, Any]:
    """``tokenizer_config.json``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|end_of_text|>",
        "pad_token": "<|end_of_text|>",
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": spec.max_positions,
    }


def _control_names(count: int) -> list[str]:
    reserved = count - len(_CONTROL)
    return [*_CONTROL, *(f"<|reserved_special_token_{3 + index}|>" for index in range(reserved))]


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


def _begin_with(name: str, token_id: int) -> dict[str, Any]:
    start = {"SpecialToken": {"id": name, "type_id": 0}}
    first, second = ({"Sequence": {"id": which, "type_id": 0}} for which in ("A", "B"))
    return {
        "type": "TemplateProcessing",
        "single": [start, first],
        "pair": [start, first, start, second],
        "special_tokens": {name: {"id": name, "ids": [token_id], "tokens": [name]}},
    }


def _sentences(source: random.Random) -> Iterator[str]:
    """Sentences of common stems with endings, frequent words first, with some numbers among them."""
    for _ in range(6000):
        words = []
        for _ in range(source.randint(4, 14)):
            rank = int(len(_STEMS) * source.random() ** 2)
            word = _STEMS[rank] + source.choice(_ENDINGS)
            if source.random() < 0.05:
                word = str(source.randint(0, 9999))
            words.append(word.capitalize() if source.random() < 0.1 else word)
        yield " ".join(words) + source.choice(_MARKS)
