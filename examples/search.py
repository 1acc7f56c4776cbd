#!/usr/bin/env python
"""Search a folder of pictures by text or picture, through a running service.

    python examples/search.py index examples/images
    python examples/search.py query examples/images "a yellow heart beside an orange triangle"
    python examples/search.py query examples/images --image photo.jpg
    python examples/search.py query examples/images "a yellow heart" --rerank

``index`` embeds what is new below the folder and keeps the vectors in one file, by content and model, so it
can be stopped and run again. ``query`` prints the best pictures and writes them to search.png and
search.html. The service is at --url or TESSERA_URL; its API key, if it asks for one, is in TESSERA_API_KEY.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path

from image_search.errors import FolderError, IndexFileError, SearchError
from image_search.folder import pictures, shown
from image_search.index import Index
from image_search.indexing import describe, index_files
from image_search.query import Query, ask, rerank
from image_search.report import write_report
from image_search.service import Service
from image_search.sheet import write_sheet

INDEX_NAME = ".tessera-search.sqlite"


def main(argv: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A terminal that cannot show a character is no reason to stop.
            stream.reconfigure(errors="replace")
    parsed = _parser().parse_args(argv)
    try:
        status = asyncio.run(_index(parsed) if parsed.command == "index" else _query(parsed))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever read the list, head perhaps, has seen enough; what is left is not to be written at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except SearchError as error:
        print(f"search: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("search: stopped; what is embedded is kept, the same command goes on", file=sys.stderr)
        return 130


async def _index(parsed: argparse.Namespace) -> int:
    folder = parsed.folder.resolve()
    files = pictures(folder)
    async with _service(parsed) as service:
        model = await service.served()
        with Index(_index_path(parsed), create=True) as index:
            report = await index_files(
                folder, files, index, service, model, concurrency=parsed.concurrency, batch=parsed.batch
            )
    print(describe(report, model))
    return 1 if report.failures else 0


async def _query(parsed: argparse.Namespace) -> int:
    query = Query(parsed.text, parsed.image)
    if not parsed.folder.is_dir():
        raise FolderError(f"{shown(parsed.folder)}: no such folder")
    folder = parsed.folder.resolve()
    with Index(_index_path(parsed), create=False) as index:
        async with _service(parsed) as service:
            model = await service.served()
            if model.key not in (known := index.models()):
                held = ", ".join(name.rpartition(" ")[0] for name in known) or "nothing"
                raise IndexFileError(
                    f"{index.path}: holds vectors of {held}, and not of the {model.name} that is served now; "
                    "run the index command again"
                )
            hits = index.search(model.key, await ask(query, service, model), folder, parsed.top)
            if hits and parsed.rerank is not None:
                hits = await rerank(query, service, parsed.rerank, hits)
    if not hits:
        raise IndexFileError(
            f"{index.path}: holds nothing of {shown(parsed.folder)}; run the index command again"
        )
    if model.note:
        print(f"note: {model.note}", file=sys.stderr)
    print(query)
    for place, hit in enumerate(hits, 1):
        print(f"{place:4}. {hit.score:6.3f}  {'  '.join(_short(path) for path in hit.paths)}")
    write_sheet(parsed.sheet, query, hits, model.name)
    write_report(parsed.html, query, hits, model.name)
    print(f"written: {parsed.sheet} and {parsed.html}")
    return 0


def _short(path: Path) -> str:
    return shown(Path(os.path.relpath(path)))


def _service(parsed: argparse.Namespace) -> Service:
    return Service(parsed.url, os.environ.get("TESSERA_API_KEY"))


def _index_path(parsed: argparse.Namespace) -> Path:
    return Path(parsed.index or parsed.folder / INDEX_NAME)


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("folder", type=Path, help="pictures, also in folders below it")
    shared.add_argument("--index", type=Path, metavar="FILE", help=f"FOLDER/{INDEX_NAME} by default")
    shared.add_argument(
        "--url",
        default=os.environ.get("TESSERA_URL", "http://127.0.0.1:8000"),
        help="of the service (%(default)s)",
    )
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").replace("``", ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    index = commands.add_parser("index", parents=[shared], help="embed what is new in a folder")
    index.add_argument("--concurrency", type=_positive, default=4, help="requests at a time (%(default)s)")
    index.add_argument("--batch", type=_positive, default=8, help="pictures in a request (%(default)s)")
    query = commands.add_parser("query", parents=[shared], help="rank a folder's pictures")
    query.add_argument("text", nargs="?", default="", help="what to look for")
    query.add_argument("--image", type=Path, metavar="FILE", help="a picture to look for the like of")
    query.add_argument(
        "--rerank",
        nargs="?",
        const="",
        metavar="MODEL",
        help="have these put in order by a reranker of the same service: the only one, or that of this name",
    )
    query.add_argument("--top", type=_positive, default=12, help="results (%(default)s)")
    query.add_argument(
        "--sheet",
        type=Path,
        default=Path("search.png"),
        metavar="PNG",
        help="where the picture of the results goes (%(default)s)",
    )
    query.add_argument(
        "--html",
        type=Path,
        default=Path("search.html"),
        metavar="HTML",
        help="where the page goes (%(default)s)",
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
