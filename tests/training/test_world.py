"""The world of the demonstration model: seeded, split for good, and said without ambiguity."""

from __future__ import annotations

import random
from collections import Counter
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from training.evaluate import word_queries
from training.render.picture import as_png, draw, encode
from training.world.compositions import Chart, Composition, Page, Scene, is_held_out, key, written
from training.world.grammar import ask, ask_words, describe
from training.world.sampling import SHARES, neighbour, sample, shares_with
from training.world.words import COLOURS, PLACES, SHAPES, WORDS

pytestmark = pytest.mark.trains


def sampled(count: int, *, held_out: bool, kind: str | None = None) -> list[Composition]:
    source = random.Random(f"{held_out} {kind}")
    return [sample(source, held_out=held_out, kind=kind) for _ in range(count)]


def test_the_two_sides_of_the_split_share_no_composition() -> None:
    training = {key(found) for found in sampled(3000, held_out=False)}
    held_out = {key(found) for found in sampled(3000, held_out=True)}
    assert not training & held_out
    source = random.Random(5)
    for composition in sampled(300, held_out=False):
        assert not is_held_out(neighbour(composition, source))


def test_a_neighbour_differs_but_stays_of_its_kind() -> None:
    source = random.Random(6)
    for kind in SHARES:
        for composition in sampled(40, held_out=False, kind=kind):
            changed = neighbour(composition, source)
            assert type(changed) is type(composition)
            assert key(changed) != key(composition)


def test_every_attribute_occurs_in_training() -> None:
    groups = [
        group
        for scene in sampled(3000, held_out=False, kind="scene")
        if isinstance(scene, Scene)
        for group in scene.groups
    ]
    assert {group.shape for group in groups} == set(SHAPES)
    assert {group.colour for group in groups} == set(COLOURS)
    assert {group.place for group in groups} == set(PLACES)
    pages = [page for page in sampled(3000, held_out=False, kind="page") if isinstance(page, Page)]
    assert {word for page in pages for word in page.words} == set(WORDS)


@pytest.mark.parametrize("kind", SHARES)
def test_a_picture_and_its_captions_follow_from_the_seed(kind: str) -> None:
    def made() -> tuple[bytes, bytes, str, str]:
        source = random.Random("again")
        composition = sample(source, held_out=True, kind=kind)
        picture = draw(composition, source)
        return (
            as_png(picture),
            encode(picture, source),
            describe(composition, source),
            ask(composition, source),
        )

    assert made() == made()


@pytest.mark.parametrize("kind", SHARES)
def test_a_caption_says_all_and_in_many_ways(kind: str) -> None:
    """Equal captions come from equal compositions only, and one composition has several captions."""
    source = random.Random(8)
    said: dict[str, str] = {}
    for composition in sampled(1500, held_out=False, kind=kind):
        caption = describe(composition, source).lower().strip(".")
        assert said.setdefault(caption, key(composition)) == key(composition)
    for composition in sampled(20, held_out=False, kind=kind):
        assert len({describe(composition, source) for _ in range(30)}) >= 5


def test_a_query_for_words_holds_words_of_the_page_only() -> None:
    source = random.Random(9)
    for page in sampled(200, held_out=True, kind="page"):
        assert isinstance(page, Page)
        query = set(ask_words(page, source).lower().strip(".").replace(",", "").split())
        asked = query & set(WORDS)
        assert asked and asked <= set(page.words)


@pytest.mark.parametrize("kind", SHARES)
def test_pictures_differ_in_shape_and_are_never_blank(kind: str) -> None:
    source = random.Random(10)
    shapes = Counter[str]()
    for composition in sampled(40, held_out=False, kind=kind):
        picture = draw(composition, source)
        aspect = picture.width / picture.height
        assert 1 / 3.1 < aspect < 3.1
        shapes["wide" if aspect > 1.2 else "tall" if aspect < 1 / 1.2 else "square"] += 1
        assert np.asarray(picture.convert("L")).std() > 3
        with Image.open(BytesIO(encode(picture, source))) as read:
            assert read.size == picture.size
    assert len(shapes) == 3


def test_a_query_for_words_has_one_right_answer() -> None:
    """Among all pictures, charts and tables included; and almost every page of several words has one."""
    compositions = sampled(1000, held_out=True)
    queries, pages = word_queries(compositions, random.Random(11))
    for query, page in zip(queries, pages, strict=True):
        asked = set(query.lower().strip(".").replace(",", "").split()) & set(WORDS)
        assert 2 <= len(asked) <= 4
        assert [number for number, one in enumerate(compositions) if asked <= written(one)] == [page]
    long = [one for one in compositions if isinstance(one, Page) and len(one.words) > 1]
    assert len(queries) > 0.95 * len(long)
    # Words that a page shares with a chart are no question about the page.
    shared = Page((), (("anchor", "brook"),))
    chart = Chart("bar", "red", ("lily", "brook"), ("anchor", "comet", "otter"), "anchor", "otter")
    assert word_queries([shared, chart], random.Random(12))[0] == []


def test_pages_become_as_frequent_as_asked_and_the_rest_stays_in_proportion() -> None:
    shares = shares_with(0.6)
    assert shares["page"] == 0.6
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["scene"] / shares["table"] == pytest.approx(SHARES["scene"] / SHARES["table"])
    assert shares_with(SHARES["page"]) == pytest.approx(SHARES)
