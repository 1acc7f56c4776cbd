"""The settings of sources."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from tessera.errors import ConfigError
from tessera.frontend.media import MediaPolicy
from tessera.settings import MIB, POSITIVE, Setting
from tessera_corpus.shard import Shard


def _no_shard(flag: str, text: str) -> str | None:
    try:
        Shard.parse(text)
    except ConfigError as error:
        return f"{flag}: {error.message}"
    return None


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """What the columns of a table are called; an empty name is of none."""

    id: Annotated[
        str,
        Setting(
            flag="--id-column", help="the column of a table with ids; without it an item's id is FILE:ROW"
        ),
    ] = "id"
    text: Annotated[str, Setting(flag="--text-column", help="the column of a table with texts")] = "text"
    image: Annotated[
        str,
        Setting(
            flag="--image-column",
            help="the column of a table with images: bytes, paths below --root, URLs, or as in `datasets`",
        ),
    ] = "image"
    page: Annotated[str, Setting(flag="--page-column", help="the column of a table with page numbers")] = (
        "page"
    )


class FetchPolicy(MediaPolicy, frozen=True, kw_only=True):
    """Rules for URLs; which files may be read is ``SourceSettings.root``."""

    allowed_local_path: Path | None = None


class ReadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How what sources name is read."""

    root: Annotated[
        Path | None,
        Setting(
            flag="--root",
            metavar="DIR",
            help="the folder of the paths in JSON lines and tables; without it there may be no paths",
        ),
    ] = None
    max_bytes: Annotated[
        int,
        Setting(
            flag="--max-file-mb", unit=MIB, check=POSITIVE, help="size of one file, also of a fetched one"
        ),
    ] = 256 << 20
    max_line_bytes: Annotated[
        int, Setting(flag="--max-line-mb", unit=MIB, check=POSITIVE, help="size of one JSON line")
    ] = 64 << 20
    columns: Columns = Columns()
    media: Annotated[FetchPolicy, Setting(group="URLs in JSON lines and tables")] = FetchPolicy()


class SourceSettings(ReadSettings, frozen=True, kw_only=True):
    """How sources are read, and how much of them."""

    shard_text: Annotated[
        str, Setting(flag="--shard", metavar="N/M", check=_no_shard, help="take one of M parts, by the id")
    ] = "1/1"

    @property
    def shard(self) -> Shard:
        return Shard.parse(self.shard_text)
