"""Folders of tables and JSON lines, as datasets are kept: in parts, and in folders such as ``year=2024``."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tessera_corpus.item import file_of
from tessera_corpus.shard import Shard
from tessera_corpus.sources.chain import Chain
from tessera_corpus.sources.folder import FILES, HIDDEN, LINK, NO_ENDING, printable

LANCE: Final = ".lance"
LINES: Final = frozenset({".jsonl", ".ndjson"})
TABLES: Final = frozenset({".parquet", LANCE})

# What Spark and Hive write beside the parts of a table begins with it.
_PRIVATE: Final = "_"
# Of a directory that a run has written.
_OUTPUT: Final = "tessera.json"


@dataclass(frozen=True, slots=True)
class Below:
    """The tables and lines of a folder, in the order of their names; and the other files, by their kind."""

    paths: Sequence[Path]
    others: Mapping[str, Sequence[str]]


def tables_below(root: Path) -> Below | None:
    """Find the tables and lines of a folder that has nothing else to embed; None for any other folder.

    Links, hidden names, names that begin with ``_``, and outputs of runs are passed over.
    """
    paths: list[Path] = []
    others: dict[str, list[str]] = {}

    def pass_over(path: Path, kind: str) -> None:
        others.setdefault(kind, []).append(printable(str(path)))

    for above, folders, files in os.walk(root):
        if _OUTPUT in files:
            folders.clear()
            continue
        entered = []
        for name in sorted(folders, key=os.fsencode):
            path = Path(above, name)
            if name.startswith((".", _PRIVATE)):
                pass_over(path, HIDDEN)
            elif path.is_symlink():
                pass_over(path, LINK)
            elif path.suffix.lower() == LANCE:
                paths.append(path)
            else:
                entered.append(name)
        folders[:] = entered
        for name in sorted(files, key=os.fsencode):
            path = Path(above, name)
            ending = path.suffix.lower()
            if name.startswith((".", _PRIVATE)):
                pass_over(path, HIDDEN)
            elif path.is_symlink():
                pass_over(path, LINK)
            elif ending in FILES:
                return None
            elif ending in LINES | TABLES:
                paths.append(path)
            else:
                pass_over(path, printable(ending) or NO_ENDING)
    return Below(sorted(paths, key=os.fsencode), others) if paths else None


@dataclass(slots=True, kw_only=True)
class Tables(Chain):
    """The tables and lines below ``root``, one after another; ``others`` is what is passed over."""

    root: Path
    shard: Shard
    others: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def gives(self, id: str, place: str, page: int | None) -> bool:
        if Chain.gives(self, id, place, page):
            return True
        # One that is gone. Of lines, the shard is that of a request, which an id does not always say.
        name, _, number = place.rpartition(":")
        path = Path(name)
        if not number.isdecimal() or path.exists() or not path.is_relative_to(self.root):
            return False
        ending = path.suffix.lower()
        if ending in LINES:
            return self.shard.count == 1
        return ending in TABLES and self.shard.holds(file_of(id, page))

    def passed_over(self) -> Mapping[str, int]:
        counts = {kind: sum(map(self.shard.holds, paths)) for kind, paths in self.others.items()}
        return Counter({kind: count for kind, count in counts.items() if count}) + Counter(
            Chain.passed_over(self)
        )
