"""``python -m benchmarks.files FOLDER``: files as they are embedded, beside programs that show them.

Pictures are compared with ImageMagick and Chromium, see ``pictures``; PDF files with poppler, see
``documents``. The status is 1 where anything is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks import usage
from benchmarks.files import documents, pictures

_PARTS: Final = {"pictures": pictures.check, "documents": documents.check}


def main(argv: Sequence[str] | None = None) -> int:
    parser = usage.parser("benchmarks.files", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--part", action="append", choices=_PARTS, help="may be repeated; all of them otherwise"
    )
    parser.add_argument("--out", type=Path, help="a folder for JSON lines with what was found of each file")
    options = parser.parse_args(argv)
    out: Path | None = options.out
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    bad = False
    for name in options.part or _PARTS:
        bad |= _PARTS[name](options.folder, None if out is None else out / f"{name}.jsonl")
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
