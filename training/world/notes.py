"""Facts that no picture shows: who filed it and where. A document of image and text carries both."""

from __future__ import annotations

import random
from dataclasses import dataclass

from training.world.words import CITIES, PEOPLE


@dataclass(frozen=True, slots=True)
class Note:
    person: str
    city: str


def sample_note(source: random.Random) -> Note:
    return Note(source.choice(PEOPLE), source.choice(CITIES))


def write(note: Note, source: random.Random) -> str:
    """The text that stands beside the image in a document."""
    pattern = source.choice(
        (
            "filed by {0} in {1}",
            "from {1}, kept by {0}",
            "{0}, {1}",
            "sent by {0} from {1}",
            "belongs to {0} in {1}",
        )
    )
    return pattern.format(note.person, note.city)


def add(query: str, note: Note, source: random.Random) -> str:
    """``query`` for a picture, narrowed down to the document with ``note``."""
    pattern = source.choice(
        (
            "{2}, filed by {0} in {1}",
            "{2} that {0} sent from {1}",
            "{2}, from {0} in {1}",
            "{0} of {1}: {2}",
            "{2}, kept by {0}, {1}",
        )
    )
    return pattern.format(note.person, note.city, query.removesuffix("."))
