"""The English of the pages: sentences to be read once, one word for a GPU, tables with names for columns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "deploy/README.md",
    *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
]
LONGEST = 40
"""Words of a sentence. A span of code is one word, and so is a link's text of one word."""


def passages(page: str) -> Iterator[str]:
    """Yield paragraphs, items of lists, headings and cells of tables; blocks of code are left out."""
    passage: list[str] = []
    in_code = False
    for line in [*page.splitlines(), ""]:
        text = line.strip()
        fence = text.startswith("```")
        if passage and (fence or not text or text[0] == "|" or re.match(r"#+ |[-*] |\d+\. |<!--", text)):
            yield " ".join(passage)
            passage = []
        if fence:
            in_code = not in_code
        elif in_code or not text or text.startswith("<!--"):
            continue
        elif text[0] == "|":
            yield from cells(text)
        else:
            passage.append(re.sub(r"^(?:#+|[-*]|\d+\.) ", "", text))


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip().removeprefix("|").removesuffix("|"))]


def prose(passage: str) -> str:
    """Return a passage with one word for each span of code, and the text of each link."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]+`", "code", passage))


def sentences(passage: str) -> list[str]:
    return re.split(r"(?<=[.?!])[\"*)]*\s+", prose(passage))


def words(sentence: str) -> list[str]:
    return [word for word in sentence.split() if re.search(r"\w", word)]


def headers(page: str) -> Iterator[list[str]]:
    """Yield the cells of the first row of each table."""
    lines = page.splitlines()
    for line, following in itertools.pairwise(lines):
        if line.startswith("|") and re.fullmatch(r"\|(?:\s*:?-+:?\s*\|)+", following):
            yield cells(line)


@pytest.mark.parametrize("name", PAGES)
def test_no_sentence_is_longer_than_a_reader_remembers(name: str) -> None:
    page = (ROOT / name).read_text()
    counted = {sentence: len(words(sentence)) for text in passages(page) for sentence in sentences(text)}
    assert {sentence: count for sentence, count in counted.items() if count > LONGEST} == {}


@pytest.mark.parametrize("name", PAGES)
def test_a_gpu_is_called_a_gpu(name: str) -> None:
    text = " ".join(prose(passage) for passage in passages((ROOT / name).read_text()))
    # A model card is a page about a model.
    assert re.findall(r"(?<!model )\bcards?\b", text, re.IGNORECASE) == []


@pytest.mark.parametrize("name", PAGES)
def test_each_column_of_a_table_has_a_name(name: str) -> None:
    assert [header for header in headers((ROOT / name).read_text()) if "" in header] == []


def test_a_sentence_that_is_too_long_is_seen() -> None:
    page = f"# A page\n\n- {'word ' * 20}\n{'word ' * 21}.\n\n| a |\n|---|\n| {'word ' * 41} |\n"
    lengths = [len(words(sentence)) for text in passages(page) for sentence in sentences(text)]
    assert [count for count in lengths if count > LONGEST] == [41, 41]
    assert list(headers("| a | |\n|---|---|\n| 1 | 2 |\n")) == [["a", ""]]
    code = f"```\n{'word ' * 50}\n```\n"
    assert list(passages(code)) == []
