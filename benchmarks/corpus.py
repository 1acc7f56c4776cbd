"""``python -m benchmarks.corpus``: a corpus embedded once without a break, and once killed again and again.

20,000 generated texts, pictures and pages of PDF files. Ids and vectors of both outputs are compared: what
goes on after kill -9 at any moment must be what was never killed. The memory of the unbroken run is printed,
too. It is a proof and no measure of speed, but it prints rates.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from benchmarks import usage
from benchmarks.proc import below
from tessera.defaults import MODEL
from tessera_tools.table import table

_PAGES: Final = 20
_MOST_SECONDS: Final = 30.0
_ALONE_SECONDS: Final = 7200.0
_COSINE: Final = 0.9999
# The corpus is so many of its kind, one after the other: memory of two quarters is of the same work then.
_ROUNDS: Final = 10
# Of vision rows, in GiB: full in the first quarter, where the default fills for longer than the run takes.
_CACHE: Final = ("--multimodal-embedding-cache-capacity-gb", "0.25")


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """What ``make_corpus`` wrote: the words of a command line, and how many items they are."""

    sources: list[str]
    items: int


@dataclass(slots=True)
class Memory:
    """Resident bytes of a run by the second: of the command itself, and of it with its children."""

    own: list[int] = field(default_factory=list)
    all: list[int] = field(default_factory=list)

    def grown(self, of: Sequence[int]) -> float:
        """The last quarter's median over the second quarter's; of runs of eight seconds at least."""
        quarter = len(of) // 4
        if quarter < 2:
            return 1.0
        return float(np.median(of[-quarter:]) / np.median(of[quarter : 2 * quarter]))


def make_corpus(
    folder: Path,
    *,
    texts: int,
    pictures: int,
    pages: int,
    seed: int = 0,
    name: str = "text",
    square: bool = False,
) -> Corpus:
    """Texts as JSON lines, pictures and PDF files in folders; nothing is there twice.

    Ids of texts begin with ``name``. A ``square`` picture or page is one tile of the demonstration model, not
    seven, which takes 24 of them from 10 s of processor time to 5 s.
    """
    generator, numbers = random.Random(seed), np.random.default_rng(seed)
    words = [
        "red",
        "green",
        "blue",
        "heart",
        "circle",
        "star",
        "triangle",
        "square",
        "above",
        "below",
        "beside",
        "small",
        "large",
        "yellow",
    ]
    lines = folder / "texts.jsonl"
    with lines.open("w") as file:
        for number in range(texts):
            text = " ".join(generator.choices(words, k=generator.randint(3, 60)))
            file.write(json.dumps({"id": f"{name}-{number}", "text": f"{number}: {text}"}) + "\n")
    for name in ("pictures", "documents"):
        (folder / name).mkdir()
    for number in range(pictures):
        noise = Image.fromarray(numbers.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        place = folder / "pictures" / f"{number % 10}"
        place.mkdir(exist_ok=True)
        noise.resize((240, 240) if square else (320, 240), Image.Resampling.BICUBIC).save(
            place / f"{number}.jpg", quality=85
        )
    for first in range(0, pages, _PAGES):
        some = range(first, min(pages, first + _PAGES))
        data = pdf(
            [f"page {number} " + " ".join(generator.choices(words, k=80)) for number in some], square=square
        )
        (folder / "documents" / f"{first}.pdf").write_bytes(data)
    return Corpus(
        sources=[str(lines), str(folder / "pictures"), str(folder / "documents")],
        items=texts + pictures + pages,
    )


def make_rounds(folder: Path, *, texts: int, pictures: int, pages: int, seed: int = 0) -> Corpus:
    """``_ROUNDS`` corpora in folders of their own, as one."""
    sources: list[str] = []
    items = 0
    for number in range(_ROUNDS):
        place = folder / f"{number}"
        place.mkdir()
        made = make_corpus(
            place,
            texts=_share(texts, number),
            pictures=_share(pictures, number),
            pages=_share(pages, number),
            seed=seed * _ROUNDS + number,
            name=f"text-{number}",
        )
        sources += made.sources
        items += made.items
    return Corpus(sources=sources, items=items)


def _share(items: int, number: int) -> int:
    """Of the round with this number."""
    return items * (number + 1) // _ROUNDS - items * number // _ROUNDS


def pdf(texts: Sequence[str], *, square: bool = False) -> bytes:
    """A file with a page of 3 by 4 inches, or of 4 by 4, for each text, as pictures."""
    drawn = []
    for text in texts:
        page = Image.new("RGB", (400 if square else 300, 400), "white")
        rows = [text[start : start + 45] for start in range(0, len(text), 45)]
        ImageDraw.Draw(page).multiline_text((10, 10), "\n".join(rows), fill="black")
        drawn.append(page)
    buffer = BytesIO()
    drawn[0].save(buffer, "PDF", save_all=True, append_images=drawn[1:], resolution=100)
    return buffer.getvalue()


def command(corpus: Corpus, out: Path, flags: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "tessera.cli", "embed", *corpus.sources, "--out", str(out), *flags]


def whole(corpus: Corpus, out: Path, flags: Sequence[str]) -> tuple[float, Memory]:
    """Seconds and memory of a run that nobody disturbs; raises ``RuntimeError`` where it fails."""
    memory, started = Memory(), time.monotonic()
    process = subprocess.Popen(command(corpus, out, flags), stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            memory.own.append(_resident([process.pid]))
            memory.all.append(_resident([process.pid, *below(process.pid)]))
            time.sleep(1.0)
            if time.monotonic() - started > _ALONE_SECONDS:
                raise RuntimeError("the run does not end")
    finally:
        process.kill()
    if process.wait() != 0:
        raise RuntimeError(f"the run ended with status {process.returncode}")
    return time.monotonic() - started, memory


def killed(corpus: Corpus, out: Path, flags: Sequence[str], *, kills: int, most: float, seed: int = 0) -> int:
    """Run it, kill it at a random moment, and again; the last run is left alone.

    Every other one is killed up to ``most`` seconds after it has published its first part, the others up to
    so many after they were started. Returns how many were killed: one that is done before ends this.
    """
    generator = random.Random(seed)
    for number in range(kills):
        before = len(_parts(out))
        process = subprocess.Popen(
            command(corpus, out, flags), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            while number % 2 == 0 and process.poll() is None and len(_parts(out)) == before:
                time.sleep(0.05)
            process.wait(generator.uniform(0, most))
            return number
        except subprocess.TimeoutExpired:
            followers = below(process.pid)
            process.send_signal(signal.SIGKILL)
            process.wait()
            _gone(followers)
    whole(corpus, out, flags)
    return kills


def _parts(out: Path) -> list[Path]:
    return list((out / "vectors").glob("part-*"))


def _gone(pids: Sequence[int]) -> None:
    """Wait until children have followed the run that was killed."""
    until = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > until:
            raise RuntimeError(f"processes stay behind a run that was killed: {pids}")
        time.sleep(0.05)


def read(out: Path) -> tuple[list[str], npt.NDArray[np.float32]]:
    """The ids of an output's parts, and their vectors ``[items, width]``."""
    import pyarrow.dataset

    found = pyarrow.dataset.dataset(out / "vectors", format="parquet").to_table(["id", "vector"])
    vectors = found["vector"].combine_chunks()
    values = np.asarray(vectors.flatten()).astype(np.float32)
    return found["id"].to_pylist(), values.reshape(len(found), -1)


def differences(one: Path, other: Path) -> tuple[list[str], float, float]:
    """What ids say against an output that is to be as another, the worst cosine, the largest step."""
    (own, mine), (ids, theirs) = read(one), read(other)
    wrong = []
    for name, found in (("one", own), ("the other", ids)):
        if len(set(found)) < len(found):
            wrong.append(f"{len(found) - len(set(found))} ids are twice in {name}")
    if missing := set(own) - set(ids):
        wrong.append(f"{len(missing)} ids are missing, {min(missing)} is one")
    if more := set(ids) - set(own):
        wrong.append(f"{len(more)} ids are of nothing, {min(more)} is one")
    if wrong:
        return wrong, 0.0, np.inf
    places = {id: place for place, id in enumerate(ids)}
    theirs = theirs[[places[id] for id in own]]
    norms = np.linalg.norm(mine, axis=1) * np.linalg.norm(theirs, axis=1)
    return wrong, float(((mine * theirs).sum(axis=1) / norms).min()), float(np.abs(mine - theirs).max())


def _resident(pids: Sequence[int]) -> int:
    pages = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/statm").read_text().split()
        except OSError:
            continue
        # Without what is shared with others: decoders share nearly all with the process that forked them.
        pages += int(fields[1]) - int(fields[2])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _said(values: Sequence[int]) -> str:
    return f"{max(values) / (1 << 20):.0f} MiB at most" if values else "not seen"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = usage.parser("benchmarks.corpus", __doc__)
    parser.add_argument("--texts", type=int, default=17_000)
    parser.add_argument("--pictures", type=int, default=1_500)
    parser.add_argument("--pages", type=int, default=1_500, help="of PDF files")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--most-seconds", type=float, default=_MOST_SECONDS, help="until one is killed")
    parser.add_argument("--dtype", choices=("float32", "float16", "int8"), default="float32")
    parser.add_argument("--model", default=str(MODEL), help="the demonstration model by default")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The status is 1 where the outputs differ."""
    options = _parse(argv)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "in").mkdir()
        corpus = make_rounds(
            folder / "in",
            texts=options.texts,
            pictures=options.pictures,
            pages=options.pages,
            seed=options.seed,
        )
        flags = ["--model", options.model, "--dtype", options.dtype, *_CACHE]
        seconds, memory = whole(corpus, folder / "whole", [*flags, "--part-seconds", "20"])
        rows: list[tuple[str, str]] = [
            ("items", f"{corpus.items:,}"),
            ("unbroken", f"{seconds:.0f} s, {corpus.items / seconds:.0f} items/s"),
            ("memory of the run", f"{_said(memory.own)}, grown {memory.grown(memory.own):.3f} times"),
            ("with its children", f"{_said(memory.all)}, grown {memory.grown(memory.all):.3f} times"),
        ]
        # Short parts: a kill is to come between them, and amid one.
        small = [*flags, "--part-rows", "500", "--part-seconds", "5"]
        kills = killed(
            corpus,
            folder / "killed",
            small,
            kills=options.kills,
            most=options.most_seconds,
            seed=options.seed,
        )
        wrong, cosine, step = differences(folder / "whole", folder / "killed")
        rows += [
            ("killed", f"{kills} times"),
            ("ids", "; ".join(wrong) or "the same, each once"),
            ("worst cosine", f"{cosine:.6f}"),
            ("largest difference of a value", f"{step:.3g}"),
        ]
        print(table(("what", "found"), rows))
        least = -1.0 if options.dtype == "int8" else _COSINE
        return int(bool(wrong) or cosine < least or (options.dtype == "int8" and step > 1))


if __name__ == "__main__":
    raise SystemExit(main())
