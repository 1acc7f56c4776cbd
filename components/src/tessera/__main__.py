"""``python -m tessera``: the command ``tessera``."""

import sys

from tessera.cli.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
