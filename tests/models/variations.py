"""Legal variations of checkpoints' files, by the family whose small checkpoint they change."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from tessera_tools.random_checkpoint import ministral3, qwen3, towers
from tessera_tools.random_checkpoint.encoder import RERANK_TINY, ROBERTA_TINY, TINY
from tests.models.declaring import write
from tests.models.running import Given, Pair

TEXTS: Final = (
    "river",
    "The old bridge, the OLD temple!  twice ",
    "Don't we'll 1,234.50 été cafe\u0301",
    "a market in the light of morning " * 6,
)
ABSENT: Final = object()
CONFIG, TOKENIZER, SETTINGS = "config", "tokenizer", "tokenizer_config"
PICTURES, PROCESSOR = "preprocessor_config", "processor_config"


@dataclass(frozen=True)
class Case:
    """Values by file and path of keys; ``refused`` is part of the complaint, empty for the same vectors."""

    name: str
    changes: Mapping[tuple[str, ...], Any] = field(default_factory=dict)
    refused: str = ""


def case(name: str, refused: str = "", /, *changes: tuple[Any, ...]) -> Case:
    """Each of the changes is a file, the keys below it and the value."""
    return Case(name, {change[:-1]: change[-1] for change in changes}, refused)


BERT: Final = (SETTINGS, "tokenizer_class", "BertTokenizer")
CLIP: Final = (SETTINGS, "tokenizer_class", "CLIPTokenizer")
PIECES: Final = (SETTINGS, "tokenizer_class", "XLMRobertaTokenizer")
IN_SEQUENCE: Final = {
    "type": "Sequence",
    "normalizers": [
        {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": False,
        }
    ],
}
# Of which text of a pair a token is then says the class.
NO_INPUTS: Final = (SETTINGS, "model_input_names", ABSENT)
METASPACE: Final = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
ANOTHER = "tokenizer_class is {!r}, which makes another {} than tokenizer.json has".format
YARN: Final = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.2,
}
MEAN: Final = [0.1, 0.2, 0.3]

CASES: Final[Mapping[str, tuple[Any, tuple[Case, ...]]]] = {
    "bert": (
        TINY,
        (
            case("as it is"),
            case("its class", "", BERT),
            case("causal", "", (CONFIG, "is_causal", True)),
            case("a class that is not compared", ANOTHER("T5Tokenizer", "parts"), (*BERT[:2], "T5Tokenizer")),
            case("any file", "", (*BERT[:2], "TokenizersBackend"), (TOKENIZER, "normalizer", None)),
            case(
                "no normaliser", ANOTHER("BertTokenizer", "normalizer"), BERT, (TOKENIZER, "normalizer", None)
            ),
            case("a sequence of one", "", BERT, (TOKENIZER, "normalizer", IN_SEQUENCE)),
            case("a model without its kind", "", BERT, (TOKENIZER, "model", "type", ABSENT)),
            case(
                "another cut",
                ANOTHER("BertTokenizer", "pre_tokenizer"),
                BERT,
                (TOKENIZER, "pre_tokenizer", {"type": "WhitespaceSplit"}),
            ),
            case(
                "another unknown token",
                ANOTHER("BertTokenizer", "model"),
                BERT,
                (SETTINGS, "unk_token", "[PAD]"),
            ),
            case(
                "longer words",
                ANOTHER("BertTokenizer", "model"),
                BERT,
                (TOKENIZER, "model", "max_input_chars_per_word", 7),
            ),
        ),
    ),
    "bert_rerank": (
        RERANK_TINY,
        (
            case("its class", "", NO_INPUTS, BERT),
            case("a length", "", NO_INPUTS, BERT, (SETTINGS, "model_max_length", 40)),
            case("any file", "", NO_INPUTS, (*BERT[:2], "TokenizersBackend")),
            case("a class without types", "", NO_INPUTS, (*BERT[:2], "DistilBertTokenizer")),
            case("no class", "model_input_names is missing", NO_INPUTS),
        ),
    ),
    "xlm_roberta": (
        ROBERTA_TINY,
        (
            case("as it is"),
            case("normaliser of the file", ANOTHER("XLMRobertaTokenizer", "normalizer"), PIECES),
            case("its class", "", PIECES, (TOKENIZER, "normalizer", None)),
            case(
                "pieces that are not split at spaces",
                "",
                PIECES,
                (TOKENIZER, "normalizer", {"type": "Strip", "strip_left": False, "strip_right": True}),
                (TOKENIZER, "pre_tokenizer", METASPACE),
            ),
            case("without a class", ANOTHER("XLMRobertaTokenizer", "normalizer"), (*PIECES[:2], ABSENT)),
        ),
    ),
    "qwen3": (
        qwen3.TINY,
        (
            case("as it is"),
            case("no theta", "", (CONFIG, "rope_theta", ABSENT)),
            case(
                "RoPE twice",
                "rope_scaling and rope_parameters are both there and differ",
                (CONFIG, "rope_parameters", {"rope_type": "default", "rope_theta": 500.0}),
                (CONFIG, "rope_scaling", {"rope_type": "default"}),
            ),
            case("both ways", "", (CONFIG, "is_causal", False)),
            case(
                "another split",
                ANOTHER("Qwen2Tokenizer", "pre_tokenizer"),
                (SETTINGS, "add_prefix_space", True),
            ),
            case(
                "whole words first",
                ANOTHER("Qwen2Tokenizer", "model"),
                (TOKENIZER, "model", "ignore_merges", True),
            ),
            case("Llama's class over bytes", "", (SETTINGS, "tokenizer_class", "LlamaTokenizerFast")),
        ),
    ),
    "ministral3": (
        ministral3.TINY,
        (
            case("as it is"),
            case(
                "an original context above RoPE",
                "",
                (CONFIG, "rope_parameters", YARN),
                (CONFIG, "original_max_position_embeddings", 16),
            ),
            case(
                "a class of which no notice is taken", "", (SETTINGS, "tokenizer_class", "RobertaTokenizer")
            ),
        ),
    ),
    "clip": (
        towers.CLIP_TINY,
        (
            case("as it is"),
            case("causal above the towers", "", (CONFIG, "is_causal", False)),
            case(
                "a causal vision tower",
                "vision_config.is_causal is true",
                (CONFIG, "vision_config", "is_causal", True),
            ),
            case(
                "another end token",
                "text_config.eos_token_id is 5, and texts end with the token 999",
                (CONFIG, "text_config", "eos_token_id", 5),
            ),
            case(
                "no end token",
                "text_config.eos_token_id is 49407",
                (CONFIG, "text_config", "eos_token_id", ABSENT),
            ),
            case("the largest token", "", (CONFIG, "text_config", "eos_token_id", 2)),
            case("a longest edge", "size must be a shortest_edge", (PICTURES, "size", "longest_edge", 84)),
            case("no size", "crop_size", (PICTURES, "size", ABSENT), (PICTURES, "crop_size", ABSENT)),
            case("the size of the class", "", (PICTURES, "size", ABSENT)),
            case("null", "do_rescale is false", (PICTURES, "do_rescale", None)),
            case("squares", "use_square_size is true", (PICTURES, "use_square_size", True)),
            case("a newer file", "", (PROCESSOR, "image_processor", "image_mean", MEAN)),
            case("its class", ANOTHER("CLIPTokenizer", "model"), CLIP),
        ),
    ),
    "siglip": (
        towers.SIGLIP_TINY,
        (
            case("as it is"),
            case("causal above the towers", "", (CONFIG, "is_causal", True)),
            case("an older section", "", (CONFIG, "text_config_dict", {"layer_norm_eps": 0.1})),
            case("null", "do_normalize is false", (PICTURES, "do_normalize", None)),
        ),
    ),
}


def varied(source: Path, target: Path, changes: Mapping[tuple[str, ...], Any]) -> Path:
    """A copy of a checkpoint with other values in its JSON files."""
    shutil.copytree(source, target, copy_function=os.link)
    files = {
        name: {} if not (source / f"{name}.json").exists() else read(source, name) for name, *_ in changes
    }
    if PROCESSOR in files:
        files[PROCESSOR] = {"image_processor": read(source, PICTURES)}
    for (name, *keys, last), value in changes.items():
        inner = files[name]
        for key in keys:
            inner = inner[key]
        inner[last] = value
        if value is ABSENT:
            del inner[last]
    for name, content in files.items():
        write(target / f"{name}.json", content)
    return target


def read(directory: Path, name: str) -> Any:
    return json.loads((directory / f"{name}.json").read_text())


def pictures() -> list[bytes]:
    """Noise of three shapes, which shows each step of a processor."""
    random, made = np.random.default_rng(0), []
    for shape in ((97, 201), (150, 67), (40, 33)):
        file = io.BytesIO()
        pixels = random.integers(0, 256, (*shape, 3), np.uint8)
        Image.fromarray(pixels).resize(shape, Image.Resampling.BICUBIC).save(file, "PNG")
        made.append(file.getvalue())
    return made


def inputs_of(family: str) -> list[Given | Pair]:
    """What tells the variations of a family apart."""
    if family == "bert_rerank":
        query = Given(parts=(TEXTS[0],))
        return [Pair(query=query, document=Given(parts=(text,))) for text in (TEXTS[0], "bridge")]
    shown = pictures() if family in ("clip", "siglip") else []
    return [Given(parts=(part,)) for part in (*shown, *TEXTS)]
