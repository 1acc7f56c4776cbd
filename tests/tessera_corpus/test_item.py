from __future__ import annotations

import msgspec
import pytest

from tessera.errors import ConfigError
from tessera.local.content import ImageFile, Part
from tessera.models.base import Role
from tessera_corpus.item import Document, Failure, Item, unique
from tessera_corpus.shard import Shard


def item(*parts: Part, id: str = "a", source: str = "a.txt", role: Role | None = None) -> Item:
    return Item(id=id, source=source, parts=parts, role=role)


def test_the_hash_is_of_what_is_embedded() -> None:
    first = item("ab", ImageFile(b"c"))
    assert first.content_hash == item("ab", ImageFile(b"c"), id="b", source="b.txt").content_hash
    assert len(first.content_hash) == 32
    others = [
        item("a", ImageFile(b"bc")),
        item("abc"),
        item(ImageFile(b"abc")),
        item("a", "b", ImageFile(b"c")),
        item(ImageFile(b"c"), "ab"),
    ]
    others.append(item("ab", ImageFile(b"c"), role=Role.QUERY))
    assert len({first.content_hash, *(other.content_hash for other in others)}) == len(others) + 1


def test_a_hash_that_is_given_stays() -> None:
    given = Item(id="a#page=1", source="a", page=1, parts=("t",), content_hash=b"h" * 32)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=Item) == given


def test_an_item_holds_something() -> None:
    with pytest.raises(ValueError, match="a text or an image"):
        item("", ImageFile(b""))


def test_a_second_item_of_an_id_is_a_failure() -> None:
    first, second, third = unique(iter([item("t", source=place) for place in ("x:1", "x:2", "x:3")]))
    assert isinstance(first, Item)
    assert isinstance(second, Failure) and second.source == "x:2" and "was there before" in second.reason
    assert isinstance(third, Failure)


def test_a_failure_does_not_take_its_id() -> None:
    rows: list[Item | Document | Failure] = [Failure(id="a", source="x:1", reason="no"), item("t")]
    assert list(unique(iter(rows))) == rows


def test_each_name_is_in_one_shard_for_good() -> None:
    shards = [Shard(number, 16) for number in range(1, 17)]
    found = [[shard.number for shard in shards if shard.holds(f"page-{n}")] for n in range(200)]
    assert all(len(numbers) == 1 for numbers in found)
    assert len({numbers[0] for numbers in found}) == 16
    # What jobs of another day have written counts on these.
    assert [numbers[0] for numbers in found[:6]] == [13, 1, 4, 2, 2, 11]


@pytest.mark.parametrize("text", ["", "3", "0/4", "5/4", "1/0", "-1/4", "1/4/2", "1/٤", " 1/4"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="shard"):
        Shard.parse(text)


def test_a_shard_is_read() -> None:
    assert Shard.parse("3/16") == Shard(3, 16)
