"""Tokens of texts against transformers' tokenizers, and what is no input of two towers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.checkpoint.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from tessera.errors import InvalidInput
from tessera.models import open_model
from tessera.models.base import Content, Model, Part, Prompt, Role, Truncate
from tessera_tools.random_checkpoint.tokenizer import byte_level_bpe
from tessera_tools.random_checkpoint.towers import (
    CLIP_TINY,
    SIGLIP2_TINY,
    SIGLIP_TINY,
    SiglipSpec,
    TowersSpec,
)
from tests.models.conftest import WriteCheckpoint
from tests.models.running import with_ids
from tests.models.two_towers.cases import TEXTS
from tests.models.two_towers.test_parity import reference

SPECS: dict[str, TowersSpec] = {"clip": CLIP_TINY, "siglip": SIGLIP_TINY, "siglip2": SIGLIP2_TINY}
MARKS = [
    "It's 2 o'clock!?",
    "  two   spaces\n\tand a line ",
    "<|endoftext|> </s> <eos>",
    "ÅNGSTRÖM…",
    "¡Hola!",
]


def prompt(model: Model, *parts: Part, truncate: Truncate = Truncate.NONE, **of: Any) -> Prompt:
    content = Content(parts=with_ids(parts), **of)
    return model.prompt(content, max_tokens=model.max_tokens, truncate=truncate, param="x")


@pytest.fixture(params=SPECS)
def model(request: pytest.FixtureRequest, written: WriteCheckpoint) -> Model:
    return open_model(written(SPECS[request.param]))


@pytest.mark.parametrize("name", SPECS)
def test_tokens_are_those_of_the_reference(name: str, written: WriteCheckpoint) -> None:
    path = written(SPECS[name])
    model, wanted = open_model(path), reference(path)
    for text in [*TEXTS, "It's 2 o'clock!?", "  two   spaces\n\tand a line ", "ÅNGSTRÖM…"]:
        assert prompt(model, text).tokens.tolist() == wanted.tokens(text), text


def _pieces(control: tuple[str, ...], suffix: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary of bytes and merges within words, of which the last pieces end in ``suffix``."""
    written = byte_level_bpe(size=700, split=r"[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+", control=(), seed=0)
    vocab: dict[str, int] = {name: number for number, name in enumerate(control)}
    merges: list[tuple[str, str]] = []
    for piece in written["model"]["vocab"]:
        vocab.setdefault(piece, len(vocab))
    for left, right in written["model"]["merges"]:
        merges.append((left, right))
        if suffix and len(right) == 1:
            merges.append((left, f"{right}{suffix}"))
            for made in (f"{right}{suffix}", f"{left}{right}{suffix}"):
                vocab.setdefault(made, len(vocab))
    for piece in list(vocab):
        if suffix and len(piece) == 1:
            vocab.setdefault(f"{piece}{suffix}", len(vocab))
    return vocab, merges


def test_the_tokenizer_of_clip(written: WriteCheckpoint, tmp_path: Path) -> None:
    """With ends of words that are pieces of their own, as the published vocabulary has them."""
    from transformers import CLIPTokenizer

    vocab, merges = _pieces(("<|startoftext|>", "<|endoftext|>"), "</w>")
    tokenizer = CLIPTokenizer(vocab=vocab, merges=merges)
    model = _with_tokenizer(replace(CLIP_TINY, end=1), tokenizer, len(vocab), tmp_path)
    for text in [*TEXTS, *MARKS]:
        expected = tokenizer(text, split_special_tokens=True)["input_ids"]
        assert prompt(model, text).tokens.tolist() == expected, text


def test_the_tokenizer_of_siglip_2(tmp_path: Path) -> None:
    from transformers import Siglip2Tokenizer

    control = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
    vocab = {
        name: number for number, name in enumerate((*control, *(f"<0x{byte:02X}>" for byte in range(256))))
    }
    words = ["▁", *"abcdefghijklmnopqrstuvwxyz", "th", "the", "▁t", "▁th", "▁the", "er", "ri", "riv", "river"]
    for piece in words:
        vocab.setdefault(piece, len(vocab))
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("▁", "th"),
        ("▁th", "e"),
        ("e", "r"),
        ("r", "i"),
        ("ri", "v"),
        ("riv", "er"),
    ]
    tokenizer = Siglip2Tokenizer(vocab=vocab, merges=merges)
    spec = SiglipSpec(bytes_vocabulary=True)
    model = _with_tokenizer(spec, tokenizer, len(vocab), tmp_path)
    for text in [*TEXTS[:4], "THE River, the river"]:
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], 1]
        assert prompt(model, text).tokens.tolist() == ids + [0] * (64 - len(ids)), text


def test_the_tokenizer_of_siglip(tmp_path: Path) -> None:
    """A vocabulary of sentencepiece, and the ``tokenizer.json`` that is made of it."""
    import sentencepiece
    from transformers import SiglipTokenizer

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join([*TEXTS, "the river and the temple", "a photo of a cat"] * 50).lower())
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "spiece"), vocab_size=90, model_type="unigram",
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    slow = SiglipTokenizer(vocab_file=str(tmp_path / "spiece.model"))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spiece.model"))
    pieces = [[processor.id_to_piece(at), processor.get_score(at)] for at in range(len(processor))]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    content = SIGLIP_TINY.files("float32", 0)[TOKENIZER_FILE] | {
        "added_tokens": [
            {"id": at, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for at, name in enumerate(("<pad>", "</s>", "<unk>"))
        ],
        "pre_tokenizer": metaspace,
        "post_processor": None,
        "model": {"type": "Unigram", "unk_id": 2, "vocab": pieces, "byte_fallback": False},
    }  # fmt: skip
    path = _written(SiglipSpec(vocab_size=len(pieces)), tmp_path, {TOKENIZER_FILE: content})
    model = open_model(path)
    for text in [*TEXTS[:3], *TEXTS[4:], "It's 2 o'clock!?", "  the   river\n and "]:
        ids = slow(text)["input_ids"]
        assert prompt(model, text).tokens.tolist() == ids + [0] * (64 - len(ids)), text


def _written(spec: TowersSpec, path: Path, files: dict[str, Any]) -> Path:
    for name, content in (spec.files("float32", 0) | files).items():
        (path / name).write_text(json.dumps(content))
    return path


def _with_tokenizer(spec: TowersSpec, tokenizer: Any, size: int, path: Path) -> Model:
    folder = path / "model"
    folder.mkdir()
    _written(replace(spec, vocab_size=max(size, 600)), folder, {})
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = size
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(path / "saved")
    for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE):
        (folder / name).write_text((path / "saved" / name).read_text())
    return open_model(folder)


def test_an_image_is_an_input_of_its_own(model: Model) -> None:
    image = model.plan(640, 480, param="x")
    made = prompt(model, image, role=Role.PASSAGE)
    assert (len(made.tokens), made.image_tokens, model.vision_index(made.tokens).tolist()) == (1, 1, [0])
    for parts in ((image, "a text"), ("a text", image), (image, image), ((5, 6), image)):
        with pytest.raises(InvalidInput, match="each on its own") as caught:
            prompt(model, *parts)
        assert caught.value.param == "x"
    with pytest.raises(InvalidInput, match="each on its own"):
        prompt(model, image, instruction="Find it")
    assert prompt(model, tuple(made.tokens.tolist()), image).tokens.tolist() == made.tokens.tolist()
    # An empty text is none.
    assert prompt(model, "", image).image_tokens == 1


def test_token_ids(model: Model) -> None:
    whole = prompt(model, "the river")
    ids = tuple(whole.tokens.tolist())
    assert prompt(model, ids).tokens.tolist() == list(ids)
    with pytest.raises(InvalidInput, match="outside the vocabulary"):
        prompt(model, (model.vocab_size,))
    if model.family == "clip":
        assert prompt(model, (*ids, ids[-1], 0, 0)).tokens.tolist() == list(ids)
        with pytest.raises(InvalidInput, match="no end token"):
            prompt(model, ids[:-1])
    else:
        end = ids.index(ids[-1])
        assert prompt(model, ids[:end]).tokens.tolist() == list(ids)


def test_what_is_too_long(model: Model) -> None:
    text = "river " * 100
    with pytest.raises(InvalidInput, match=f"over the limit of {model.max_tokens}"):
        prompt(model, text)
    whole = prompt(model, "river")
    for truncate in (Truncate.START, Truncate.END):
        made = prompt(model, text, truncate=truncate)
        assert made.truncated and len(made.tokens) == model.max_tokens
        assert made.tokens[-1] == np.trim_zeros(whole.tokens)[-1] or made.tokens[-1] in whole.tokens
