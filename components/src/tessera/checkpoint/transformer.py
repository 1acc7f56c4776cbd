"""Reads what the transformer module of ``sentence-transformers`` declares of the texts that it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tessera.checkpoint.section import CONFIG_FILE, Section
from tessera.checkpoint.tokenizer import TOKENIZER_CONFIG_FILE, Side, side_of

TRANSFORMER_FILES: Final = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)

# Arguments by their older and their newer name.
_TOKENIZER_KEYS: Final = ("tokenizer_args", "processor_kwargs")
_MODEL_KEYS: Final = ("model_args", "model_kwargs")
_CONFIG_KEYS: Final = ("config_args", "config_kwargs")

# Arguments that change the tokens of a text, with the values that change nothing here.
_USUAL: Final[Mapping[str, tuple[object, ...]]] = {
    "add_special_tokens": (True,),
    "do_lower_case": (),
    "strip_accents": (),
    "tokenize_chinese_chars": (),
    "add_prefix_space": (),
    "add_bos_token": (),
    "add_eos_token": (),
}
# Of calls alone.
_USUAL_OF_CALLS: Final[Mapping[str, tuple[object, ...]]] = {**_USUAL, "truncation_side": ("right",)}
# Where files come from, and how a model is loaded and computed, which is the operator's choice here.
_LOADING: Final = frozenset(
    {
        "trust_remote_code",
        "revision",
        "code_revision",
        "token",
        "cache_dir",
        "local_files_only",
        "force_download",
        "torch_dtype",
        "dtype",
        "device_map",
        "attn_implementation",
        "low_cpu_mem_usage",
        "use_safetensors",
        "add_pooling_layer",
        "use_memory_efficient_attention",
    }
)
# What a forward pass gives of which the vectors and scores here are made.
_OUTPUTS: Final = ("last_hidden_state", "logits", "embeddings")

# A tokenizer without a limit is saved with 10 ** 30.
_NO_LIMIT: Final = 1_000_000_000


def transformer_section(directory: Path) -> Section:
    """Return the first file of the transformer module that holds something."""
    sections = [Section.read(directory / name, optional=True) for name in TRANSFORMER_FILES]
    return next((section for section in sections if section.values), sections[0])


def longest_input(directory: Path, transformer: Section) -> tuple[int | None, bool]:
    """Return the longest input, and whether only the tokenizer bounds it."""
    # What calls are given wins over the tokenizer's own argument, as in the reference.
    for section in _calls(transformer):
        if section.has("max_length"):
            return section.integer("max_length"), False
    for section in (*_sections(transformer, _TOKENIZER_KEYS), transformer):
        key = "max_seq_length" if section is transformer else "model_max_length"
        if section.has(key):
            return section.integer(key), False
    tokenizer = Section.read(directory / TOKENIZER_CONFIG_FILE, optional=True)
    limit: Any = tokenizer.values.get("model_max_length")
    # Saved as 1e30 by some versions, which is no integer.
    if limit is None or isinstance(limit, float) or limit == 0:
        return None, False
    if type(limit) is int and limit >= _NO_LIMIT:
        return None, False
    return tokenizer.integer("model_max_length"), True


def truncation_side(transformer: Section) -> Side | None:
    """Return the side that the arguments of the tokenizer have."""
    sides = map(side_of, _sections(transformer, _TOKENIZER_KEYS))
    return next(filter(None, sides), None)


def refuse_other_texts(directory: Path, transformer: Section) -> None:
    """Raise ``CheckpointError`` for arguments of the tokenizer and of its calls that change what is read.

    They are for the classes of the reference. One that repeats the tokenizer's own setting is none of them.
    """
    own = Section.read(directory / TOKENIZER_CONFIG_FILE, optional=True).values
    unchanged = {key: (*usual, own.get(key)) for key, usual in _USUAL.items()}
    arguments: list[tuple[Section, Mapping[str, tuple[object, ...]]]]
    arguments = [(section, unchanged) for section in _sections(transformer, _TOKENIZER_KEYS)]
    arguments += [(section, _USUAL_OF_CALLS) for section in _calls(transformer)]
    for section, table in arguments:
        for key, usual in table.items():
            if section.has(key) and section.values[key] not in usual:
                raise section.error(key, f"is {section.values[key]!r}, which is not done")


def refuse_other_models(transformer: Section, config: Section) -> None:
    """Raise ``CheckpointError`` for arguments that make another model than ``config.json`` and the weights.

    An argument of the configuration that repeats its value is none of them.
    """
    for section in _sections(transformer, _MODEL_KEYS):
        for key in section.values:
            if section.has(key) and key not in _LOADING:
                raise section.error(key, f"is {section.values[key]!r}, an argument that is not read")
    for section in _sections(transformer, _CONFIG_KEYS):
        for key, value in section.values.items():
            if key not in _LOADING and config.values.get(key) != value:
                raise section.error(
                    key, f"is {value!r}, and {CONFIG_FILE} has {config.values.get(key)!r}; write it there"
                )
    if transformer.has("modality_config"):
        modalities = transformer.section("modality_config")
        text = modalities.section("text") if modalities.has("text") else modalities
        if text.string("method", "forward") == "forward":
            # The pooler's output, for one, is of weights that no vector here is made of.
            text.string("method_output_name", _OUTPUTS[0], among=_OUTPUTS)
    if transformer.has("tokenizer_name_or_path"):
        raise transformer.error("tokenizer_name_or_path", "names another tokenizer, which is not read")


def _sections(section: Section, keys: Sequence[str]) -> list[Section]:
    """Return the objects below those of the keys that are there."""
    return [section.section(key) for key in keys if section.has(key)]


def _calls(transformer: Section) -> list[Section]:
    """Return the arguments of the tokenizer's calls."""
    calls = _sections(transformer, ("processing_kwargs",))
    return calls + [text for call in calls for text in _sections(call, ("text", "common"))]
