"""A hit as people see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from PIL import Image

from tessera.local.content import ImageFile
from tessera.terminal import printable
from tessera_corpus.item import Failure, Item, Origin
from tessera_corpus.results.thumbnail import Thumbnails
from tessera_corpus.search import Hit

_MAX_CHARACTERS: Final = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What was asked: a text, a picture, or both. ``small`` is None for a picture that nobody can show."""

    text: str
    picture: str = ""
    small: Image.Image | None = None

    def __str__(self) -> str:
        return " + ".join(filter(None, (f"“{self.text}”" if self.text else "", self.picture)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """``picture`` is small and RGB, ``text`` the beginning of what it says; ``note`` is what to know of them.

    Texts have nothing in them that a terminal or a page would take for a command.
    """

    score: float
    name: str
    others: tuple[str, ...]
    source: Origin
    picture: Image.Image | None = None
    text: str = ""
    note: str = ""


def entry_of(hit: Hit, found: Item | Failure, thumbnails: Thumbnails) -> Entry:
    """``found`` is what is at the hit's first place now."""
    first, *others = hit.places
    picture: Image.Image | None = None
    unseen = ""
    if isinstance(found, Item):
        files = [part for part in found.parts if isinstance(part, ImageFile)]
        if files:
            made = thumbnails.make(files[0].data, source=found.source)
            picture, unseen = (None, made) if isinstance(made, str) else (made, "")
    text, note = beginning_of(hit, found)
    return Entry(
        score=hit.score,
        name=printable(first.id),
        others=tuple(printable(place.id) for place in others),
        source=first,
        picture=picture,
        text=text,
        note=printable(unseen) or note,
    )


def beginning_of(hit: Hit, found: Item | Failure | None, most: int = _MAX_CHARACTERS) -> tuple[str, str]:
    """The beginning of a hit's text, and what to know of it; neither where it was not read again."""
    if found is None:
        return "", ""
    if isinstance(found, Failure):
        return "", printable(found.reason)
    text = " ".join(" ".join(part for part in found.parts if isinstance(part, str)).split())
    # The hash of a page is of how it was drawn, too.
    changed = found.page is None and found.content_hash != hit.content_hash
    shown = printable(text[:most] + ("…" if len(text) > most else ""))
    return shown, "changed since it was embedded" if changed else ""
