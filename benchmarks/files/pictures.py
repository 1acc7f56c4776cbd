"""Pictures of a folder as the service's decoder embeds them, beside ImageMagick and Chromium.

Every page of a file goes through a confined decoder of a worker, and so does what the other programs show of
it: what is compared is what an engine gets, in steps of 255. A picture is right where it is at most
``MOST_APART`` from what one of them shows, of the same size.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.files.shown import Chromium, by_imagemagick, imagemagick
from tessera.errors import DecodeFailed, TesseraError
from tessera.heif import needs_threads
from tessera.imaging import MAX_PIXELS
from tessera.local.content import ImageFile
from tessera.models import open_model
from tessera.models.base import Pixels
from tessera.worker.decoding import Decoder, Limits, ProcessDecoder
from tessera_corpus.item import Item
from tessera_corpus.sources.folder import PICTURES
from tessera_corpus.sources.pictures import picture_rows
from tessera_tools.random_checkpoint.checkpoint import main as make_checkpoint
from tessera_tools.table import table

MOST_APART: Final = 3.0
# Of a file: others are of the same kind.
_MOST_PAGES: Final = 8
_PARAM: Final = "the file"
_OTHERS: Final = ("ImageMagick", "Chromium")
VERDICTS: Final = {
    "as both": "right",
    "as ImageMagick": "right",
    "as Chromium": "right",
    "refused": "refused, and so by the others",
    "refused alone": "refused, and shown by another",
    "wrong": "not what any of the others shows",
    "lost": "the decoder crashed or ran out of time",
    "read alone": "read, and by no other",
}
_BAD: Final = ("wrong", "lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What became of a picture; ``apart`` from each of the others, in steps of 255, where it shows it."""

    path: str
    page: int
    verdict: str
    said: str
    apart: dict[str, float | None]


def check(folder: Path, out: Path | None = None) -> bool:
    """Print what became of the pictures of a folder; whether any is wrong."""
    program = imagemagick()
    if program is None:
        raise SystemExit("ImageMagick is not installed: scripts/system-packages")
    kinds: dict[str, Counter[str]] = {}
    bad = False
    with Chromium() as browser, _decoder() as decoder:
        file = out.open("w") if out is not None else None
        for found in _all(folder, decoder, browser, program):
            ending = Path(found.path).suffix.lower()
            kinds.setdefault(ending, Counter())[found.verdict] += 1
            bad |= found.verdict in _BAD
            if file is not None:
                file.write(json.dumps(asdict(found)) + "\n")
                file.flush()
            if found.verdict in _BAD:
                print(
                    f"{found.verdict}: {found.path} page {found.page}: {found.said} {found.apart}", flush=True
                )
        if file is not None:
            file.close()
    counts = {**dict(sorted(kinds.items())), "all": sum(kinds.values(), Counter[str]())}
    rows = [[name, *(str(count[verdict]) for verdict in VERDICTS)] for name, count in counts.items()]
    print(table(("ending", *VERDICTS), rows))
    return bad


class _decoder:
    """A worker's decoder, for the pages of the demonstration model."""

    def __enter__(self) -> Decoder:
        self._folder = tempfile.TemporaryDirectory()
        checkpoint = Path(self._folder.name) / "model"
        make_checkpoint(["--out", str(checkpoint)])
        vision = open_model(checkpoint).vision
        assert vision is not None
        limits = Limits(seconds=60.0, memory_bytes=2 << 30, max_pixels=MAX_PIXELS, threads=needs_threads())
        self._decoder = ProcessDecoder(checkpoint, {}, vision, limits, count=2)
        return self._decoder

    def __exit__(self, *_: object) -> None:
        self._decoder.close()
        self._folder.cleanup()


def _all(folder: Path, decoder: Decoder, browser: Chromium, program: str) -> Iterator[Found]:
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in PICTURES and path.is_file() and not path.is_symlink():
            yield from _of(path, decoder, browser, program)


def _of(path: Path, decoder: Decoder, browser: Chromium, program: str) -> Iterator[Found]:
    """What became of each page of a file."""
    data = path.read_bytes()
    rows = picture_rows(str(path), str(path), data)
    for page, row in enumerate(rows[:_MOST_PAGES]):
        if not isinstance(row, Item) or not isinstance(part := row.parts[0], ImageFile):
            said = "" if isinstance(row, Item) else row.reason
            yield Found(path=str(path), page=page, verdict="refused", said=said, apart={})
            continue
        others = by_imagemagick(program, path, page), browser.shown(data) if len(rows) == 1 else None
        yield _found(path, page, _embedded(decoder, part.data), others, decoder)


def _embedded(decoder: Decoder, data: bytes) -> Pixels | TesseraError:
    try:
        return decoder.decode(data, param=_PARAM)
    except TesseraError as error:
        return error


def _found(
    path: Path,
    page: int,
    ours: Pixels | TesseraError,
    shown: tuple[bytes | None, bytes | None],
    decoder: Decoder,
) -> Found:
    others = [None if data is None else _embedded(decoder, data) for data in shown]
    if isinstance(ours, TesseraError):
        alone = any(isinstance(other, Pixels) for other in others)
        verdict = "lost" if isinstance(ours, DecodeFailed) else "refused alone" if alone else "refused"
        apart = {name: None for name, other in zip(_OTHERS, others, strict=True) if isinstance(other, Pixels)}
        return Found(path=str(path), page=page, verdict=verdict, said=ours.message, apart=dict(apart))
    apart = {
        name: _apart(ours, other)
        for name, other in zip(_OTHERS, others, strict=True)
        if isinstance(other, Pixels)
    }
    near = [name for name, value in apart.items() if value is not None and value <= MOST_APART]
    if not apart:
        verdict = "read alone"
    elif not near:
        verdict = "wrong"
    else:
        verdict = "as both" if len(near) == len(_OTHERS) else f"as {near[0]}"
    return Found(path=str(path), page=page, verdict=verdict, said="", apart=apart)


def _apart(ours: Pixels, other: Pixels) -> float | None:
    """The mean difference in steps of 255; None where the sizes make another plan."""
    if ours.values.shape != other.values.shape or ours.plan != other.plan:
        return None
    scale = 255.0 if ours.values.dtype.kind == "f" else 1.0
    return round(float(np.abs(ours.values.astype(np.float32) - other.values).mean()) * scale, 2)
