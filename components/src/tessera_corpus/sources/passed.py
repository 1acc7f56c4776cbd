"""What was passed over, in words."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

_MOST_KINDS: Final = 8
# What sources can be, but not in a folder: those would be tables of something else, more often than not.
_NAMED: Final = frozenset({".jsonl", ".ndjson", ".parquet", ".lance"})


# What a folder may have that is read once it is another file.
_TABLES: Final = frozenset({".csv", ".tsv", ".xls", ".xlsx", ".ods"})
_DOCUMENTS: Final = frozenset(
    {".doc", ".docx", ".odp", ".odt", ".ppt", ".pptx", ".rtf", ".html", ".htm", ".epub"}
)


def remedies(endings: Collection[str]) -> str:
    """Return how files that are not read become some that are, as the end of a sentence; or nothing."""
    said = ""
    if not _TABLES.isdisjoint(endings):
        said += "; save tables as .parquet or .jsonl"
    if not _DOCUMENTS.isdisjoint(endings):
        said += "; save documents as .pdf"
    return said


def said_of(passed: Mapping[str, int]) -> str:
    """Return such as ``5 files passed over: .heic 3, links 2``, the most frequent kinds first."""
    kinds = sorted(passed.items(), key=lambda kind: (-kind[1], kind[0]))
    said = [f"{kind} {count:,}" for kind, count in kinds[:_MOST_KINDS]]
    rest = sum(count for _, count in kinds[_MOST_KINDS:])
    if rest:
        said.append(f"others {rest:,}")
    count = sum(passed.values())
    hint = "; tables and JSON lines are read where they are named" if _NAMED & passed.keys() else ""
    return f"{count:,} file{'' if count == 1 else 's'} passed over: {', '.join(said)}{hint}{remedies(passed)}"
