"""``tessera search``: what of a corpus is nearest to a text, a picture, or both."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import uvloop

from tessera.command import OneLineParser
from tessera.errors import ConfigError, InvalidInput, TesseraError
from tessera.flags import HelpFormatter, add_flags, read_flags, take_variables
from tessera.local.content import ImageFile, Part
from tessera.local.model_info import ModelInfo
from tessera.local.plan import model_of_environment, plan_engines
from tessera.models.base import Role
from tessera.process_exit import leave
from tessera.settings import POSITIVE, Revision, Setting
from tessera.terminal import complain, printable, say
from tessera_corpus.embedder import Embedder, VectorSettings
from tessera_corpus.engines import EngineEmbedder
from tessera_corpus.item import Embedded, Failure, Item
from tessera_corpus.output.row import CHANGED
from tessera_corpus.results.contents import Contents
from tessera_corpus.results.entry import Query, beginning_of, entry_of
from tessera_corpus.results.page import write_page
from tessera_corpus.results.rerank import reranked
from tessera_corpus.results.sheet import write_sheet
from tessera_corpus.results.thumbnail import Thumbnails
from tessera_corpus.search import Hit, Matrix, Table
from tessera_corpus.service import KEY_VARIABLE, Service, ServiceEmbedder, ServiceSettings
from tessera_corpus.sources.settings import ReadSettings

_TEXT: Final = """\
Searches the vectors in DIR that tessera embed has written: all of them, or by the index of a Lance table.
The query is embedded by the model that made them, by an engine of this command or, with --url, a service.
Results are read again from where they were embedded from: each has the beginning of its text, or its
file and page; --json is for programs, --html and --sheet show them."""

_SNIPPET_CHARACTERS: Final = 100
_INDENT: Final = 14

_NOTES: Final = {
    "random": "{} has random weights: the order of the results means nothing",
    "demo": "{} is a demonstration model of synthetic scenes; it knows no photographs",
}


class SearchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One search."""

    image: Annotated[
        Path | None, Setting(flag="--image", metavar="FILE", help="a picture to look for the like of")
    ] = None
    top: Annotated[int, Setting(flag="--top", check=POSITIVE, help="results")] = 12
    html: Annotated[
        Path | None,
        Setting(flag="--html", metavar="FILE", help="write a page of the results, which needs nothing else"),
    ] = None
    sheet: Annotated[
        Path | None, Setting(flag="--sheet", metavar="FILE", help="write a PNG picture of the results")
    ] = None
    json: Annotated[
        bool, Setting(flag="--json", help="print the results as one JSON object, for programs")
    ] = False
    model: Annotated[
        str,
        Setting(flag="--model", help="as for tessera embed; with --url a name that is served"),
    ] = ""
    revision: Revision = ""
    service: Annotated[ServiceSettings, Setting(group="service")] = ServiceSettings()
    read: Annotated[ReadSettings, Setting(group="how results are read again, as tessera embed had it")] = (
        ReadSettings()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """One command line: ``rerank`` is None for none, and empty for the only reranker."""

    directory: Path
    text: str
    rerank: str | None
    settings: SearchSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Hits, the best first, with what is there now where that was asked for."""

    served: ModelInfo
    scores: str
    hits: Sequence[tuple[Hit, Item | Failure | None]]


def main(arguments: Sequence[str], prog: str = "tessera search") -> int:
    """Prints the hits, the best first; the status is 1 after an error."""
    parser = OneLineParser(prog=prog, description=_TEXT, formatter_class=HelpFormatter, allow_abbrev=False)
    parser.add_argument("directory", type=Path, metavar="DIR", help="that tessera embed --out was given")
    parser.add_argument("text", nargs="?", default="", help="what to look for")
    parser.add_argument(
        "--rerank",
        nargs="?",
        const="",
        metavar="MODEL",
        help="have the results put in order by a reranker of the service: the only one there, or MODEL",
    )
    add_flags(parser, SearchSettings)
    try:
        take_variables(parser, SearchSettings)
        # A flag may stand between the directory and the text.
        parsed, more = parser.parse_known_intermixed_args(arguments)
        if more and not any(word.startswith("-") for word in more):
            words = shlex.quote(" ".join([parsed.text, *more]))
            complain(f"{prog}: a text of several words goes in quotes: {prog} {parsed.directory} {words}")
            return 2
        parser.parse_intermixed_args(arguments)
        asked = _Asked(
            directory=parsed.directory,
            text=parsed.text,
            rerank=parsed.rerank,
            settings=read_flags(SearchSettings, parsed),
        )
        _say(asked, uvloop.run(_search(asked)))
        return 0
    except TesseraError as error:
        complain(f"{prog}: {error.message}")
        return 1


async def _search(asked: _Asked) -> _Found:
    settings = asked.settings
    if asked.rerank is not None and not settings.service.url:
        raise ConfigError("--rerank asks a reranker of a service, and --url names none")
    table = Table(asked.directory)
    item = _query(asked.text, settings.image, table.kind.role)
    embedder = await _embedder(table, settings)
    served = embedder.served
    try:
        if served.fingerprint != table.kind.fingerprint:
            holds = f"{asked.directory} holds vectors of {table.kind.model}"
            if served.name == table.kind.model:
                raise ConfigError(f"{holds}, {CHANGED}: tessera embed --replace makes them again")
            raise ConfigError(
                f"{holds}, and {served.name} is another model: --model names the one that made them"
            )
        (made,) = await embedder.embed([item])
    finally:
        await embedder.close()
    if not isinstance(made, Embedded):
        raise InvalidInput(f"the query cannot be embedded: {made.reason}")
    # To draw a page again takes 0.1 s; its file and number say enough in a list.
    drawn = asked.rerank is not None or settings.html is not None or settings.sheet is not None
    with Contents(settings.read) as contents:
        hits = _there(table, made.rows.values, settings.top, contents)
        there = [
            (hit, contents.read(hit.places[0]) if drawn or hit.places[0].page is None else None)
            for hit in hits
        ]
    if asked.rerank is None:
        return _Found(served=served, scores=_scores(table), hits=there)
    service = Service(settings.service, os.environ.get(KEY_VARIABLE))
    try:
        ranked = await reranked(service, asked.rerank, item, _drawn(there))
    finally:
        await service.close()
    for hit, found in _drawn(there):
        if isinstance(found, Failure):
            complain(f"{hit.places[0].id}: left out: {found.reason}")
    return _Found(served=served, scores="reranked", hits=ranked)


def _there(table: Table, query: Matrix, top: int, contents: Contents) -> list[Hit]:
    """The best hits whose files and pages are there.

    Where none of the files is, they are elsewhere, and all are hits.
    """
    since, most = table.written, top
    while True:
        found = table.search(query, most)
        known = {place: contents.there(place, since) for hit in found for place in hit.places}
        if found and not any(is_there is not False for is_there in known.values()):
            complain("none of the files is here: tessera search finds them where tessera embed was run")
            return found[:top]
        hits = []
        for hit in found:
            places = tuple(place for place in hit.places if known[place] is not False)
            if places:
                hits.append(replace(hit, places=places))
        left_out = len(found) - len(hits)
        if len(hits) >= top or len(found) < most or not left_out:
            if left_out:
                complain(f"{left_out} left out: not there any more; tessera embed removes what is gone")
            return hits[:top]
        most += max(top, left_out)


def _scores(table: Table) -> str:
    return "by MaxSim" if table.kind.tokens else "by cosine"


def _say(asked: _Asked, found: _Found) -> None:
    settings = asked.settings
    note = _NOTES.get(found.served.checkpoint)
    if note is not None:
        complain(f"note: {note.format(found.served.name)}")
    if settings.json:
        print(json.dumps(_json(found), ensure_ascii=False, indent=2))
    else:
        for place, (hit, there) in enumerate(found.hits, 1):
            say(f"{place:4}. {hit.score:6.3f}  {_said(hit)}{_snippet(hit, there)}")
    if settings.html is None and settings.sheet is None:
        return
    with closing(Thumbnails()) as thumbnails:
        query = _shown_query(asked, thumbnails)
        entries = [entry_of(hit, there, thumbnails) for hit, there in _drawn(found.hits)]
    said = f"{len(entries)} results of {found.served.name}, {found.scores}"
    for path, write in ((settings.html, write_page), (settings.sheet, write_sheet)):
        if path is not None:
            write(path, query, entries, said)
            (complain if settings.json else say)(f"written: {path}")


_Read = Item | Failure


def _drawn(hits: Sequence[tuple[Hit, _Read | None]]) -> list[tuple[Hit, _Read]]:
    """The hits whose contents were read again."""
    return [(hit, there) for hit, there in hits if there is not None]


def _snippet(hit: Hit, there: _Read | None) -> str:
    """A second line: where a hit is, unless its id says so, and the beginning of its text."""
    first = hit.places[0]
    text, note = beginning_of(hit, there, _SNIPPET_CHARACTERS)
    # A page's id ends with its number.
    named = first.source.endswith(first.id.partition("#page=")[0])
    said = ["" if named else printable(first.source), text and f"“{text}”", note and f"({note})"]
    line = "  ".join(filter(None, said))
    return f"\n{' ' * _INDENT}{line}" if line else ""


def _json(found: _Found) -> dict[str, Any]:
    """The results for a program."""
    results = []
    for rank, (hit, there) in enumerate(found.hits, 1):
        first = hit.places[0]
        text, note = beginning_of(hit, there)
        results.append(
            {
                "rank": rank,
                "score": hit.score,
                "id": first.id,
                "source": first.source,
                "page": first.page,
                "same_as": [place.id for place in hit.places[1:]],
                "text": text,
                "note": note,
            }
        )
    return {"model": found.served.name, "scores": found.scores.removeprefix("by "), "results": results}


def _shown_query(asked: _Asked, thumbnails: Thumbnails) -> Query:
    image = asked.settings.image
    if image is None:
        return Query(text=printable(asked.text))
    small = thumbnails.make(_read(image), source=str(image))
    return Query(
        text=printable(asked.text),
        picture=printable(image.name),
        small=None if isinstance(small, str) else small,
    )


def _query(text: str, image: Path | None, role: Role | None) -> Item:
    """A text asks as a query. A picture, with or without a text, asks for the like of what is there."""
    parts: list[Part] = []
    if image is not None:
        parts.append(ImageFile(_read(image)))
    if text.strip():
        parts.append(text)
    if not parts:
        raise ConfigError("give a text, or a picture with --image, or both")
    return Item(id="query", source="query", parts=tuple(parts), role=role if image else Role.QUERY)


def _read(image: Path) -> bytes:
    try:
        return image.read_bytes()
    except OSError as error:
        raise ConfigError(f"--image {image}: {error.strerror}") from error


async def _embedder(table: Table, settings: SearchSettings) -> Embedder:
    vectors = VectorSettings(input_type=Role.QUERY, dimensions=table.kind.width)
    if settings.service.url:
        key = os.environ.get(KEY_VARIABLE)
        return await ServiceEmbedder.start(settings.service, vectors, settings.model, key)
    model = settings.model or model_of_environment()
    plan = plan_engines(model, settings.revision, vectors.options, log=["--log-level", "warning"], most=1)
    return await EngineEmbedder.open(plan, vectors)


def _said(hit: Hit) -> str:
    names = [printable(place.id) for place in hit.places]
    return "  ".join(names[:4]) + (f"  and {len(names) - 4} more" if len(names) > 4 else "")


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
