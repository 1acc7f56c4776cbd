"""``python -m benchmarks.known_texts --out FILE``: texts that a machine with this environment has anyway.

Each question is one that a known text answers. The file is for another machine, which has others.

Docstrings of Python's library and of installed packages, manual pages, and what packages say of themselves
and of their licences. A question is a heading, a page's line about itself, or the first sentence of a
docstring, and what follows it answers; text without either is there to be mistaken for it.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks import usage

_PACKAGES: Final = ("numpy", "PIL", "fastapi", "safetensors")
# Where there are no manual pages.
_LARGE_PACKAGES: Final = ("torch", "transformers")
_MANUALS: Final = Path("/usr/share/man")
_DOCS: Final = Path("/usr/share/doc")
_LEAST: Final = 60
_WORDS: Final = 4
_SENTENCE: Final = re.compile(r"(.+?[.:!?])\s+(.+)", re.DOTALL)
_ROFF: Final = re.compile(r"\\f.|\\[-&|^/,]|\\s[-+]?\d")
_HEADING: Final = re.compile(r"(?:#+\s+(.+)|(.+)\n[=\-~^]{3,})")


@dataclass(frozen=True, slots=True)
class Known:
    """A passage, and the question that it answers; empty if there is none."""

    passage: str
    question: str = ""


@dataclass(frozen=True, slots=True)
class KnownTexts:
    """Passages of which the first answer the questions, in their order."""

    passages: list[str]
    questions: list[str]

    def write(self, path: Path) -> None:
        path.write_bytes(gzip.compress(json.dumps([self.passages, self.questions]).encode()))

    @classmethod
    def read(cls, path: Path) -> KnownTexts:
        return cls(*json.loads(gzip.decompress(path.read_bytes())))


def known_texts(passages: int, questions: int, letters: int) -> KnownTexts:
    """Find so many, of so many letters at most.

    All differ, and are spread evenly over what there is. Raises ``SystemExit`` where that is less.
    """
    library, installed = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    found: dict[str, Known] = {}
    asked: dict[str, Known] = {}
    for texts in (
        _docstrings([library, *(installed / package for package in _PACKAGES)]),
        _manuals(),
        _docs(),
        _docstrings([installed / package for package in _LARGE_PACKAGES]),
    ):
        # The last are many: torch and transformers alone take 40 s to read.
        if len(found) >= passages and len(asked) >= questions:
            break
        for known in texts:
            passage = " ".join(known.passage.split())[:letters].rsplit(" ", 1)[0]
            question = " ".join(known.question.split())[:letters]
            if len(passage) >= _LEAST and passage not in found:
                found[passage] = kept = Known(passage, question)
                if len(question.split()) >= _WORDS:
                    asked.setdefault(question, kept)
    if len(found) < passages or len(asked) < questions:
        raise SystemExit(f"there are {len(found)} passages and {len(asked)} questions on this machine")
    chosen = _spread(list(asked.values()), questions)
    wanted = {known.passage: known for known in chosen}
    others = [known for known in found.values() if known.passage not in wanted]
    every = [*chosen, *_spread(others, passages - len(chosen))]
    return KnownTexts([one.passage for one in every], [one.question for one in chosen])


def add_counts(parser: argparse.ArgumentParser) -> None:
    """How many texts there are, and how long they may be."""
    parser.add_argument("--passages", type=int, default=20_000)
    parser.add_argument("--queries", type=int, default=5_000, help="questions that passages answer")
    parser.add_argument("--letters", type=int, default=1_000, help="of a text, at most")
    parser.add_argument("--calibrate", type=int, default=64, help="inputs that are not searched")


def _spread(items: list[Known], count: int) -> list[Known]:
    return [items[number * len(items) // count] for number in range(count)]


def _docstrings(roots: Sequence[Path]) -> Iterator[Known]:
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            inside = path.relative_to(root).parts
            if "site-packages" in inside or "test" in inside or "tests" in inside:
                continue
            try:
                module = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError, OSError):
                continue
            for node in ast.walk(module):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    split = _SENTENCE.match(ast.get_docstring(node) or "")
                    if split is not None:
                        yield Known(split[2], split[1])


def _manuals() -> Iterator[Known]:
    for path in sorted(_MANUALS.glob("man[1-8]/*.gz")):
        try:
            lines = gzip.decompress(path.read_bytes()).decode(errors="replace").splitlines()
        except (OSError, EOFError, gzip.BadGzipFile):
            continue
        kept = [line for line in lines if not line.startswith((".\\", "'", ".TH", ".if", ".ie", ".de"))]
        text = _ROFF.sub(lambda found: "-" if found[0] == "\\-" else "", "\n".join(kept))
        parts = re.split(r"^\.S[Hh]\s+", text, flags=re.MULTILINE)
        named = {part.partition("\n")[0].strip(' "').upper(): part.partition("\n")[2] for part in parts[1:]}
        question = _plain(named.get("NAME", "")).partition(" - ")[2]
        yield Known(_plain(named.get("DESCRIPTION", "")), question)


def _plain(roff: str) -> str:
    return " ".join(re.sub(r"^\.\S*\s?", "", line).replace('"', "") for line in roff.splitlines())


def _docs() -> Iterator[Known]:
    for path in sorted(_DOCS.rglob("*")):
        if (
            path.suffix not in ("", ".txt", ".md", ".rst")
            or not path.is_file()
            or path.stat().st_size > 1 << 20
        ):
            continue
        heading = ""
        for paragraph in path.read_text(errors="replace").split("\n\n"):
            if (found := _HEADING.fullmatch(paragraph.strip())) is not None:
                heading = found[1] or found[2]
            else:
                yield Known(paragraph, heading)
                heading = ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = usage.parser("benchmarks.known_texts", __doc__)
    add_counts(parser)
    parser.add_argument("--out", type=Path, required=True, help="for --texts of benchmarks.quantization")
    options = parser.parse_args(argv)
    found = known_texts(options.passages + options.calibrate, options.queries, options.letters)
    found.write(options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
