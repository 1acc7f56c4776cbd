"""``python -m benchmarks.peer``: the service beside vLLM, on the same inputs, in the same run.

One after the other and from the same client processes run the engines in process, Tessera as it starts with
nothing set, and with ``--vllm SITE`` vLLM from the packages in SITE. Rates, latencies, processors, clock and
power of each go to ``peer.csv`` as they come, and vectors of both are compared. ``--parts`` picks among them.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import http, usage, vllm_peer
from tessera_tools.load.bodies import WORKLOADS


def main(argv: Sequence[str] | None = None) -> int:
    return vllm_peer.compare(_parse(argv))


def _workload(value: str) -> tuple[str, int]:
    name, _, loop = value.partition("@")
    if name not in WORKLOADS:
        raise argparse.ArgumentTypeError(f"workload {name!r} is none of: {', '.join(WORKLOADS)}")
    return name, int(loop or 64)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = usage.parser("benchmarks.peer", __doc__)
    parser.add_argument("--vllm", type=Path, metavar="SITE", help="packages of vLLM, for its PYTHONPATH")
    parser.add_argument("--vllm-python", default="python3", help="the interpreter of these packages")
    parser.add_argument(
        "--vllm-command", help="start this instead: a server at {port} that serves {model} as {name}"
    )
    parser.add_argument("--api-servers", type=int, default=6, help="API processes of vLLM")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=vllm_peer.PARTS,
        help="one after the other; several runs may share their --out",
    )
    parser.add_argument(
        "--quantization",
        choices=("fp8",),
        help="of the products of both servers, in half precision or as the checkpoint has them without it",
    )
    parser.add_argument("--limit", type=float, default=1500.0, help="seconds for all parts")
    parser.add_argument("--workloads", nargs="*", type=_workload, default=vllm_peer.USUAL, metavar="NAME[@N]")
    http.add_shared(parser)
    options = parser.parse_args(argv, argparse.Namespace(rate=None, mode="agg"))
    options.parts = options.parts or ["engine", "default", *(["vllm"] if options.vllm is not None else [])]
    if options.vllm is None and "vllm" in options.parts:
        parser.error("--parts vllm needs --vllm")
    return options


if __name__ == "__main__":
    # So that `timeout` leaves no server behind: they are in process groups of their own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    raise SystemExit(main())
