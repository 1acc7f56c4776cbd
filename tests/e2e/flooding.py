"""``python -m tests.e2e.flooding NAME PORT GRPC_PORT MODEL``: a flood of ``benchmarks.floods``, until killed.

Writes the status of each answer to a line of standard output.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.floods import FLOODS, Target


class _Told(list[int]):
    def __setitem__(self, status: object, number: object) -> None:
        print(status, flush=True)


@contextmanager
def flooding(name: str, port: int, grpc_port: int, model: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run one in a process of its own, from its first answer on."""
    command = [sys.executable, "-m", __name__, name, str(port), str(grpc_port), model]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            yield process
        finally:
            process.kill()


def main(name: str, port: str, grpc_port: str, model: str) -> None:
    target = Target(
        port=int(port), grpc_port=int(grpc_port), model=model, pictures=0, answers=_Told([0] * 1000)
    )
    FLOODS[name](target)()


if __name__ == "__main__":
    main(*sys.argv[1:])
