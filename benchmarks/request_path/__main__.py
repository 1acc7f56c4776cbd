"""``python -m benchmarks.request_path``: the files of the package that a text and an image pass, in order.

A file counts when one of its functions is called, in any process, for one warm request to an encode and an
embed worker on CPU (``--mode agg``: to one aggregated worker). So do the lines of these functions, each once.
Found by ``sys.setprofile``: methods that dataclasses generate belong to no file, and what C or Rust code does
without Python is not seen.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.request_path.record import Stop, record
from benchmarks.shape import PACKAGE


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.request_path", description=__doc__)
    parser.add_argument("--model-path", type=Path, default=PACKAGE / "checkpoints" / "tessera-demo")
    parser.add_argument("--mode", choices=("agg", "e_p"), default="e_p")
    parser.add_argument("--markdown", action="store_true", help="as docs/architecture.md has it")
    options = parser.parse_args(argv)
    paths = record(options.model_path, mode=options.mode)
    text, image = paths.text.stops, paths.image.stops
    beyond = tuple(stop for stop in image if stop.file not in {stop.file for stop in text})
    if options.markdown:
        print(f"A text passes {len(text)} files:\n\n{markdown(text)}\n")
        print(f"An image passes {len(image)}; beyond those of a text:\n\n{markdown(beyond)}")
        return 0
    for name, path in (("a text", paths.text), ("an image", paths.image)):
        files = f"{len(path.stops)} files, {path.lines_of_files} lines"
        print(f"{name}: {files}; {len(path.functions)} functions, {path.lines_of_functions} lines")
        for number, stop in enumerate(path.stops, 1):
            print(f"  {number:3} {stop.role:14} {stop.file}")
    return 0


def markdown(stops: Sequence[Stop]) -> str:
    """A list item for each process in turn, with its files in order."""
    return "\n".join(
        f"- {role}: " + ", ".join(f"`{stop.file.removesuffix('.py')}`" for stop in group)
        for role, group in groupby(stops, key=lambda stop: stop.role)
    )


if __name__ == "__main__":
    sys.exit(main())
