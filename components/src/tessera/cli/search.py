"""``tessera search``: what of a corpus is nearest to a text, a picture, or both."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import uvloop

from tessera.corpus.cards import EngineProcesses, plan_engines
from tessera.corpus.embedder import Embedder, InputType, VectorSettings
from tessera.corpus.item import Embedded, Item, Part, Picture
from tessera.corpus.search import Hit, Table
from tessera.corpus.service import KEY_VARIABLE, ServiceEmbedder, ServiceSettings
from tessera.defaults import MODEL
from tessera.errors import ConfigError, InvalidInput, TesseraError
from tessera.models.base import Role
from tessera.process_exit import leave
from tessera.settings import POSITIVE, HelpFormatter, Revision, Setting, add_flags, read_flags

_TEXT = """\
Searches the vectors in DIR that tessera embed has written: all of them, or by the index of a Lance table.
The query is embedded by the model that made them, by an engine of this command or, with --url, a service."""


class SearchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One search."""

    image: Annotated[
        Path | None, Setting(flag="--image", metavar="FILE", help="a picture to look for the like of")
    ] = None
    top: Annotated[int, Setting(flag="--top", check=POSITIVE, help="results")] = 12
    model: Annotated[
        str,
        Setting(flag="--model", help="as for tessera embed; with --url a name that is served"),
    ] = ""
    revision: Revision = ""
    service: Annotated[ServiceSettings, Setting(group="service")] = ServiceSettings()


def main(arguments: Sequence[str], prog: str = "tessera search") -> int:
    """Prints the hits, the best first; the status is 1 after an error."""
    parser = argparse.ArgumentParser(
        prog=prog, description=_TEXT, formatter_class=HelpFormatter, allow_abbrev=False
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="that tessera embed --out was given")
    parser.add_argument("text", nargs="?", default="", help="what to look for")
    add_flags(parser, SearchSettings)
    parsed = parser.parse_args(arguments)
    try:
        settings = read_flags(SearchSettings, parsed)
        for place, hit in enumerate(uvloop.run(_search(parsed.directory, parsed.text, settings)), 1):
            print(f"{place:4}. {hit.score:6.3f}  {_said(hit)}")
        return 0
    except TesseraError as error:
        sys.stderr.write(f"{prog}: {error.message}\n")
        return 1


async def _search(directory: Path, text: str, settings: SearchSettings) -> list[Hit]:
    table = Table(directory)
    item = _query(text, settings.image, table.kind.role)
    embedder = await _embedder(table, settings)
    try:
        if embedder.served.fingerprint != table.kind.fingerprint:
            raise ConfigError(
                f"{directory} holds vectors of {table.kind.model}, and {embedder.served.name} is another "
                "model: --model names the one that made them"
            )
        (made,) = await embedder.embed([item])
    finally:
        await embedder.close()
    if not isinstance(made, Embedded):
        raise InvalidInput(f"the query cannot be embedded: {made.reason}")
    return table.search(made.rows, settings.top)


def _query(text: str, image: Path | None, role: Role | None) -> Item:
    """A text asks as a query. A picture, with or without a text, asks for the like of what is there."""
    parts: list[Part] = []
    if image is not None:
        try:
            parts.append(Picture(image.read_bytes()))
        except OSError as error:
            raise ConfigError(f"--image {image}: {error.strerror}") from error
    if text.strip():
        parts.append(text)
    if not parts:
        raise ConfigError("give a text, or a picture with --image, or both")
    return Item(id="query", source="query", parts=tuple(parts), role=role if image else Role.QUERY)


async def _embedder(table: Table, settings: SearchSettings) -> Embedder:
    vectors = VectorSettings(input_type=InputType.QUERY, dimensions=table.kind.width)
    if settings.service.url:
        key = os.environ.get(KEY_VARIABLE)
        return await ServiceEmbedder.start(settings.service, vectors, settings.model, key)
    model = settings.model or os.environ.get("MODEL_PATH") or str(MODEL)
    plan = plan_engines(model, settings.revision, vectors, log=["--log-level", "warning"], most=1)
    return await EngineProcesses.start(plan)


def _said(hit: Hit) -> str:
    names = [place.id for place in hit.places]
    return "  ".join(names[:4]) + (f"  and {len(names) - 4} more" if len(names) > 4 else "")


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
