"""Words that texts of an exact number of tokens are made of."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Protocol

from tessera.models import Model, open_model
from tessera.models.base import Content, Truncate

_MOST: Final = 2000
# What stands for a space in the names of tokens: of byte-level BPE, and of SentencePiece.
_SPACES: Final = ("\u0120", "\u2581")
_LETTERS: Final = tuple("abcdefghijklmnopqrstuvwxyz")
# Tokens of their own, behind a space, in the vocabularies of the families that are served.
_COMMON: Final = """
air all and any arm art bad bag bank base beach bird black blood blue board boat body book box
boy bread bridge brown building bus business camera car card case cat cell center chair chart
church city class clock cloud coffee color computer corner country cup dark data day door dress
drive ear earth east edge egg energy engine eye face family farm field film fire fish floor
flower food foot forest form game garden glass gold green group hair hall hand head health heart
hill history home horse hospital hotel hour house ice image island key kitchen land language law
leaf leg letter level library light line lion list machine map market metal milk model money
moon morning mountain mouth movie music name night north nose number ocean oil orange page paint
paper park party people phone photo picture plane plant plate police pool power price problem
queen question radio rain red report rice ring river road rock room rule salt school science sea
season shape ship shoe shop side silver sky snow song south space sport spring square star state
station stone store story street sugar summer sun table tea teacher team test text tiger time
tower town toy train tree truck user valley village voice wall war watch water weather week west
wheel white wind window winter wood word work world yard year yellow
"""


class Words(Protocol):
    """A vocabulary. Each word is one token more behind another."""

    def all(self) -> Sequence[str]: ...

    def tokens(self, text: str) -> int:
        """Of the prompt that a text becomes; none of no text."""
        ...


@dataclass(frozen=True)
class CheckpointWords:
    """Those of a checkpoint's tokenizer."""

    path: Path

    def all(self) -> Sequence[str]:
        return _of_checkpoint(self.path)

    def tokens(self, text: str) -> int:
        return _count(_opened(self.path), text) if text else 0


@cache
def _opened(path: Path) -> Model:
    return open_model(path)


@cache
def _of_checkpoint(path: Path) -> list[str]:
    """Words that are a token behind a space, as most words of a text are; letters where there are none."""
    model = _opened(path)
    names = [model.token_text(token) for token in range(model.vocab_size)]
    behind_space = [name[1:] for name in names if name.startswith(_SPACES)]
    # WordPiece marks what continues a word, and no space.
    words = sorted(
        word for word in behind_space or names if len(word) > 2 and word.isascii() and word.isalpha()
    )
    some = random.Random(0).sample(words, min(len(words), _MOST)) + list(_LETTERS)
    before = _count(model, "a")
    if _count(model, "a b") == before:  # every prompt is padded to one length
        return some
    return [word for word in some if _count(model, f"a {word}") == before + 1]


def _count(model: Model, text: str) -> int:
    prompt = model.prompt(
        Content(parts=(text,)), max_tokens=model.max_tokens, truncate=Truncate.NONE, param="input"
    )
    return len(prompt.tokens)


@dataclass(frozen=True, slots=True)
class ServedWords:
    """Those that a service was asked for: ``prompt`` tokens stand beside them in every prompt."""

    words: tuple[str, ...]
    prompt: int

    @classmethod
    def ask(cls, tokens: Callable[[Sequence[str]], Sequence[int]]) -> ServedWords:
        """``tokens`` are those of each of some texts. Raises ``ValueError`` where no word is one token."""
        candidates = (*_COMMON.split(), *_LETTERS)
        first, *counts = tokens(["a", *(f"a {word}" for word in candidates)])
        behind = [word for word, count in zip(candidates, counts, strict=True) if count == first + 1]
        # A text begins with one of them, where it may be more tokens than behind a space.
        found = [word for word, count in zip(behind, tokens(behind), strict=True) if count == first]
        if not found:
            raise ValueError("no word is one token of its tokenizer")
        return cls(tuple(found), first - 1)

    def all(self) -> Sequence[str]:
        return self.words

    def tokens(self, text: str) -> int:
        return self.prompt + len(text.split()) if text else 0
