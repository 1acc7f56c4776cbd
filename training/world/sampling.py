"""Random compositions, and neighbours that differ from one in a single respect."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from training.world.compositions import (
    Chart,
    Composition,
    Group,
    Page,
    Pair,
    Scene,
    Table,
    Thing,
    is_held_out,
)
from training.world.words import (
    CHART_KINDS,
    COLOURS,
    OPPOSITES,
    PLACES,
    RELATIONS,
    SHAPES,
    SIZES,
    WORDS,
)

_COLOUR_NAMES = tuple(COLOURS)
CHART_COLOURS = tuple(name for name in _COLOUR_NAMES if name not in ("white", "grey", "black", "yellow"))
SHARES = {"scene": 0.27, "pair": 0.13, "page": 0.36, "chart": 0.14, "table": 0.1}
"""How often each kind of composition occurs."""


def shares_with(pages: float) -> dict[str, float]:
    """``SHARES`` with another share of pages, the other kinds keeping their proportions."""
    rest = (1 - pages) / (1 - SHARES["page"])
    return {kind: pages if kind == "page" else share * rest for kind, share in SHARES.items()}


def sample(
    source: random.Random,
    *,
    held_out: bool,
    kind: str | None = None,
    shares: Mapping[str, float] = SHARES,
) -> Composition:
    """A composition of one side of the split; of any kind, as often as ``shares`` has it, or of ``kind``."""
    chosen = kind or source.choices(tuple(shares), tuple(shares.values()))[0]
    while True:
        found = _MAKERS[chosen](source)
        if is_held_out(found) == held_out:
            return found


def sample_simple(source: random.Random) -> Composition:
    """A training composition to begin with: shapes, or a page of three words at most."""
    kind = source.choice(("scene", "pair", "page", "page"))
    while True:
        found = sample(source, held_out=False, kind=kind)
        if not isinstance(found, Page) or len(found.words) <= 3:
            return found


def neighbour(composition: Composition, source: random.Random) -> Composition:
    """A training composition that differs in one respect: a colour, a place, a word, who is above whom."""
    while True:
        found = _changed(composition, source)
        if found != composition and not is_held_out(found):
            return found


def _scene(source: random.Random) -> Scene:
    count = source.choices((1, 2, 3), (0.25, 0.45, 0.3))[0]
    places = sorted(source.sample(range(len(PLACES)), count))
    return Scene(tuple(_group(source, PLACES[place]) for place in places))


def _group(source: random.Random, place: str) -> Group:
    count = source.choices((1, 2, 3, 4, 5), (0.4, 0.2, 0.16, 0.12, 0.12))[0]
    return Group(
        count=count,
        size=source.choice(SIZES) if count == 1 else "",
        colour=source.choice(_COLOUR_NAMES),
        shape=source.choice(SHAPES),
        place=place,
    )


def _pair(source: random.Random) -> Pair:
    first, second = _thing(source), _thing(source)
    while second.colour == first.colour:
        second = _thing(source)
    return Pair(first, source.choice(RELATIONS), second)


def _thing(source: random.Random) -> Thing:
    return Thing(source.choice(_COLOUR_NAMES), source.choice(SHAPES))


def _page(source: random.Random) -> Page:
    lines = source.choices((1, 2, 3, 4), (0.35, 0.3, 0.2, 0.15))[0]
    lengths = [source.choices((1, 2, 3), (0.25, 0.45, 0.3))[0] for _ in range(lines)]
    titled = 2 if lines > 1 and source.random() < 0.4 else 0
    words = iter(source.sample(WORDS, sum(lengths) + titled))
    title = tuple(next(words) for _ in range(titled))
    return Page(title, tuple(tuple(next(words) for _ in range(length)) for length in lengths))


def _chart(source: random.Random) -> Chart:
    count = source.randint(3, 5)
    words = source.sample(WORDS, count + 2)
    labels = tuple(words[2:])
    highest, lowest = source.sample(labels, 2)
    kind = source.choice(CHART_KINDS)
    colour = "mixed" if kind == "pie" else source.choice(CHART_COLOURS)
    return Chart(kind, colour, tuple(words[:2]), labels, highest, lowest)


def _table(source: random.Random) -> Table:
    columns, rows = source.randint(1, 2), source.randint(2, 4)
    words = source.sample(WORDS, 2 + columns + rows)
    names = words[2 + columns :]
    return Table(
        tuple(words[:2]),
        tuple(words[2 : 2 + columns]),
        tuple((name, tuple(source.randint(1, 99) for _ in range(columns))) for name in names),
    )


_MAKERS: dict[str, Callable[[random.Random], Composition]] = {
    "scene": _scene,
    "pair": _pair,
    "page": _page,
    "chart": _chart,
    "table": _table,
}


def _changed(composition: Composition, source: random.Random) -> Composition:
    match composition:
        case Scene(groups):
            index = source.randrange(len(groups))
            changed = list(groups)
            changed[index] = _changed_group(groups[index], source, {group.place for group in groups})
            return Scene(tuple(sorted(changed, key=lambda group: PLACES.index(group.place))))
        case Pair(first, relation, second):
            swapped = OPPOSITES.get(relation, relation)
            return source.choice(
                (
                    Pair(first, swapped, second),
                    Pair(second, relation, first),
                    Pair(replace(first, shape=source.choice(SHAPES)), relation, second),
                    Pair(first, relation, replace(second, shape=source.choice(SHAPES))),
                )
            )
        case Page(title, lines):
            row = source.randrange(len(lines))
            return Page(title, (*lines[:row], _reworded(lines[row], source), *lines[row + 1 :]))
        case Chart(labels=labels):
            highest, lowest = source.sample(labels, 2)
            return replace(composition, highest=highest, lowest=lowest)
        case Table(rows=rows):
            row = source.randrange(len(rows))
            name, numbers = rows[row]
            fresh = (name, tuple(source.randint(1, 99) for _ in numbers))
            return replace(composition, rows=(*rows[:row], fresh, *rows[row + 1 :]))


def _changed_group(group: Group, source: random.Random, taken: set[str]) -> Group:
    respect = source.choice(("count", "size", "colour", "shape", "place"))
    if respect == "count":
        count = source.randint(1, 5)
        return replace(group, count=count, size=source.choice(SIZES) if count == 1 else "")
    if respect == "size":
        return replace(group, size=source.choice(SIZES) if group.size else "")
    if respect == "colour":
        return replace(group, colour=source.choice(_COLOUR_NAMES))
    if respect == "shape":
        return replace(group, shape=source.choice(SHAPES))
    return replace(group, place=source.choice([place for place in PLACES if place not in taken]))


def _reworded(line: tuple[str, ...], source: random.Random) -> tuple[str, ...]:
    position = source.randrange(len(line))
    return (*line[:position], source.choice(WORDS), *line[position + 1 :])
