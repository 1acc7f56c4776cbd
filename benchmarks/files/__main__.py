"""``python -m benchmarks.files FOLDER``: files as they are embedded, beside programs that show them.

Pictures are compared with ImageMagick and Chromium, see ``pictures``. The status is 1 where one is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks import usage
from benchmarks.files import pictures


def main(argv: Sequence[str] | None = None) -> int:
    parser = usage.parser("benchmarks.files", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="a file of JSON lines with what was found of each file")
    options = parser.parse_args(argv)
    return int(pictures.check(options.folder, options.out))


if __name__ == "__main__":
    raise SystemExit(main())
