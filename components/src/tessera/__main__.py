"""The command ``tessera``, and ``python -m tessera``: Ctrl-C ends it without a traceback from here on."""

import signal
import sys


def main() -> int:
    # What follows is imported for 0.2 s, up to a command's own module; `nohup` has it ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tessera.cli.__main__ import main as answer

    return answer()


if __name__ == "__main__":
    sys.exit(main())
