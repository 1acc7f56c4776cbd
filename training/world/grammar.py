"""English for compositions: many ways to say the same, none of them ambiguous unless asked to be partial."""

from __future__ import annotations

import random
from collections.abc import Sequence

from training.world.compositions import Chart, Composition, Group, Page, Pair, Scene, Table, Thing
from training.world.words import COUNTS, OPPOSITES

_PLURALS = {"cross": "crosses"}
_PLACES_BEFORE = ("at the {0}", "in the {0}", "{0}:", "on the {0}")
_PLACES_AFTER = ("at the {0}", "in the {0}", "on the {0}")
_SIZE_WORDS = {"small": ("small", "little", "small"), "large": ("large", "big", "large")}
_PICTURES = ("a picture of ", "an image showing ", "a drawing with ", "a scene with ", "", "", "", "shown: ")
_RELATION_PHRASES = {
    "left of": ("to the left of", "left of", "on the left side of"),
    "right of": ("to the right of", "right of", "on the right side of"),
    "above": ("above", "over", "on top of"),
    "below": ("below", "under", "beneath"),
    "inside": ("inside", "within", "enclosed by"),
}
_PAGES = (
    "a page that says {0}",
    "a page with the words {0}",
    "text that reads {0}",
    "a sign saying {0}",
    "{0}",
    "a note with the text {0}",
)
_WORD_QUERIES = (
    "{0}",
    "{0}",
    "a page that mentions {0}",
    "where is {0} written",
    "the words {0}",
    "find the page with {0}",
    "the sheet that says {0}",
)
_CHARTS = {
    "bar": ("bar chart", "bar graph", "column chart"),
    "line": ("line chart", "line graph", "line plot"),
    "pie": ("pie chart", "pie chart", "pie diagram"),
}


def describe(composition: Composition, source: random.Random) -> str:
    """A caption that states everything the composition holds."""
    match composition:
        case Scene(groups):
            said = _scene(groups, source)
        case Pair():
            said = _pair(composition, source)
        case Page(title, lines):
            said = _page(title, lines, source)
        case Chart():
            said = _chart(composition, source)
        case Table():
            said = _table(composition, source)
    return _finished(said, source)


def ask(composition: Composition, source: random.Random) -> str:
    """A short query that some of the composition answers; others may answer it as well."""
    match composition:
        case Scene(groups):
            said = _group(source.choice(groups), source, placed=source.random() < 0.6)
        case Pair(first, _, second):
            said = f"{_thing(first, source)} and {_thing(second, source)}"
        case Page():
            return ask_words(composition, source)
        case Chart():
            kind = source.choice(_CHARTS[composition.kind])
            said = source.choice(("a {0} about {1}", "{1} {0}", "{0} titled {1}")).format(
                kind, " ".join(composition.title)
            )
        case Table():
            said = source.choice(("a table about {0}", "{0} table", "table titled {0}")).format(
                " ".join(composition.title)
            )
    return _finished(said, source)


def ask_words(page: Page, source: random.Random) -> str:
    """A query of two to four words that are written on ``page``, in reading order."""
    return ask_for(pick_words(page, source), source)


def pick_words(page: Page, source: random.Random) -> tuple[str, ...]:
    """Two to four words of ``page``, wherever they stand, in reading order; fewer if it has no more."""
    words = page.words
    count = min(len(words), source.choice((2, 3, 3, 4)))
    chosen = sorted(source.sample(range(len(words)), count))
    return tuple(words[position] for position in chosen)


def ask_for(picked: Sequence[str], source: random.Random) -> str:
    """A query for whatever has these words on it."""
    joined = " ".join(picked) if source.random() < 0.5 else _listed(picked)
    return _finished(source.choice(_WORD_QUERIES).format(joined), source)


def _scene(groups: Sequence[Group], source: random.Random) -> str:
    # The place before every group or after every one: mixed, nobody could tell which it belongs to.
    place_first = source.random() < 0.35
    told = [
        _group(group, source, placed=True, place_first=place_first)
        for group in source.sample(groups, len(groups))
    ]
    joined = ", ".join(told) if source.random() < 0.4 else _listed(told)
    return source.choice(_PICTURES) + joined


def _group(group: Group, source: random.Random, *, placed: bool, place_first: bool = False) -> str:
    looks = f"{group.colour} {group.shape if group.count == 1 else _plural(group.shape)}"
    if group.size:
        looks = f"{source.choice(_SIZE_WORDS[group.size])} {looks}"
    if group.count == 1:
        number = source.choice((_article(looks), _article(looks), "one", "a single"))
    else:
        number = source.choice((COUNTS[group.count - 1], COUNTS[group.count - 1], str(group.count)))
    said = f"{number} {looks}"
    if not placed:
        return said
    place = "middle" if group.place == "centre" and source.random() < 0.3 else group.place
    if place_first:
        return f"{source.choice(_PLACES_BEFORE).format(place)} {said}"
    return f"{said} {source.choice(_PLACES_AFTER).format(place)}"


def _pair(pair: Pair, source: random.Random) -> str:
    first, relation, second = pair.first, pair.relation, pair.second
    if relation in OPPOSITES and source.random() < 0.4:
        first, relation, second = second, OPPOSITES[relation], first
    if relation == "inside" and source.random() < 0.4:
        verb = source.choice(("around", "that contains", "enclosing"))
        return source.choice(_PICTURES) + f"{_thing(second, source)} {verb} {_thing(first, source)}"
    phrase = source.choice(_RELATION_PHRASES[relation])
    verb = source.choice(("", "", "is ", "sits "))
    start = source.choice(_PICTURES) if not verb else ""
    return f"{start}{_thing(first, source)} {verb}{phrase} {_thing(second, source)}"


def _thing(thing: Thing, source: random.Random) -> str:
    looks = f"{thing.colour} {thing.shape}"
    return f"{source.choice((_article(looks), _article(looks), 'the'))} {looks}"


def _article(following: str) -> str:
    return "an" if following[0] in "aeiou" else "a"


def _page(title: Sequence[str], lines: Sequence[Sequence[str]], source: random.Random) -> str:
    separator = source.choice((", ", " / ", " ", "; "))
    body = separator.join(" ".join(line) for line in lines)
    if not title:
        return source.choice(_PAGES).format(source.choice(("{0}", '"{0}"')).format(body))
    pattern = source.choice(
        (
            'a page titled "{0}" with the text {1}',
            "a page under the heading {0}: {1}",
            "{0}: {1}",
            "text {1} below the title {0}",
        )
    )
    return pattern.format(" ".join(title), body)


def _chart(chart: Chart, source: random.Random) -> str:
    kind = source.choice(_CHARTS[chart.kind])
    title = " ".join(chart.title)
    coloured = kind if chart.colour == "mixed" else f"{chart.colour} {kind}"
    start = source.choice(
        ('a {0} titled "{1}"', "a {0} of {1}", "{1}, a {0}", "a {0} with the title {1}")
    ).format(coloured, title)
    labels = source.choice(("showing {0}", "for {0}", "with {0}", "that compares {0}")).format(
        _listed(chart.labels)
    )
    extremes = source.choice(
        (
            "{0} is highest and {1} lowest",
            "the most is {0}, the least is {1}",
            "largest {0}, smallest {1}",
            "{0} leads and {1} is last",
        )
    ).format(chart.highest, chart.lowest)
    return f"{start} {labels}; {extremes}"


def _table(table: Table, source: random.Random) -> str:
    start = source.choice(
        ('a table titled "{0}"', "a table of {0}", "{0}, a table", "a table with the title {0}")
    ).format(" ".join(table.title))
    columns = _listed(table.columns)
    rows = "; ".join(f"{name} {' '.join(map(str, numbers))}" for name, numbers in table.rows)
    return f"{start} with {columns}: {rows}"


def _listed(items: Sequence[str]) -> str:
    if len(items) == 1:
        return items[0]
    return f"{', '.join(items[:-1])} and {items[-1]}"


def _plural(shape: str) -> str:
    return _PLURALS.get(shape, f"{shape}s")


def _finished(said: str, source: random.Random) -> str:
    if source.random() < 0.35:
        said = said[0].upper() + said[1:]
    if source.random() < 0.2:
        said += "."
    return said
