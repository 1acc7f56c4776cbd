"""The words that a corpus adds to the command ``tessera``; nothing here imports what they do."""

from __future__ import annotations

from typing import Final

from tessera.command import Command

# What it needs beyond the base is decided for each file and each format: lines of text need nothing.
EMBED: Final = Command("embed a corpus: folders, JSON lines, tables, PDF files", "tessera_corpus.cli.embed")
SEARCH: Final = Command(
    "search what tessera embed has written, by text or picture",
    "tessera_corpus.cli.search",
    extra="corpus",
    needs=("pyarrow",),
)
