"""A flood, until it is killed: ``python -m tests.e2e.flooding NAME PORT GRPC_PORT MODEL``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.floods import FLOODS, Target


@contextmanager
def flooding(name: str, port: int, grpc_port: int, model: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run one in a process of its own, once what it sends is made."""
    command = [sys.executable, "-m", __name__, name, str(port), str(grpc_port), model]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            yield process
        finally:
            process.kill()


def main(name: str, port: str, grpc_port: str, model: str) -> None:
    target = Target(port=int(port), grpc_port=int(grpc_port), model=model, pictures=0, answers=[0] * 1000)
    flood = FLOODS[name](target)
    print("made", flush=True)
    flood()


if __name__ == "__main__":
    main(*sys.argv[1:])
