"""``python -m tessera.launch``: what ``launch/agg.sh``, ``launch/e_p.sh`` and ``deploy/start-role`` run."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

USAGE: Final = """usage: python -m tessera.launch [--root FOLDER] agg|e_p [FLAG...]
       python -m tessera.launch [--root FOLDER] role|task frontend|agg|encode|embed [FLAG...]
"""


def main(argv: Sequence[str]) -> int:
    """``--root`` is the repository, or the folder of an image."""
    words = list(argv)
    root = Path(__file__).parents[4]
    prepared = False
    while words and words[0].startswith("--"):
        option = words.pop(0)
        if option == "--root" and words:
            root = Path(words.pop(0))
        elif option == "--prepared":
            prepared = True
        else:
            sys.stderr.write(USAGE)
            return 2
    if words and words[0] in ("role", "task"):
        from tessera.launch.processes import without_source
        from tessera.launch.role import become, keep

        environment = without_source(os.environ, root)
        if words[0] == "task":
            return keep(words[1:], environment)
        become(words[1:], environment)
    # What comes while modules are imported is found by launch.children.Signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    # Beside the imports: each takes 50 ms.
    current = None if prepared else _look_at_environment(root)
    from tessera.launch.scripts import SCRIPTS, launch

    if words and words[0] in SCRIPTS:
        return launch(SCRIPTS[words[0]], root, words[1:], prepared=prepared, current=current)
    sys.stderr.write(USAGE)
    return 2


def _look_at_environment(root: Path) -> int | None:
    """The id of a process that ends with 0 where the environment is as it should be; None without one."""
    setup = str(root / "scripts" / "setup")
    try:
        return os.posix_spawn(setup, [setup, "--current", "worker"], os.environ)
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
