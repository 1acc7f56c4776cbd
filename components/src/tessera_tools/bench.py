"""``tessera bench``: what a running service gives its clients, in a closed loop or an open one.

It needs no checkpoint: the service says what its model reads, and how many tokens a text has.
"""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tessera.command import OneLineParser
from tessera.flags import HelpFormatter
from tessera.terminal import complain, no_answer, say
from tessera_tools.load.bodies import WORKLOADS, HttpWorkload
from tessera_tools.load.clients import Load, Outcome, drive
from tessera_tools.load.words import ServedWords
from tessera_tools.table import number, table, write_csv

HEADER = ("workload", "loop", "requests/s", "inputs/s", "p50 ms", "p90 ms", "p99 ms", "errors", "checked")

_SECONDS = 30.0


class NoService(Exception):
    """A service that cannot be measured, and why."""


def main(arguments: Sequence[str] | None = None, prog: str = "tessera bench") -> int:
    """Print a table; 1 where a request of the window failed or was answered wrongly, or nothing answers."""
    options = _parse(arguments, prog)
    url, key = options.url.rstrip("/"), os.environ.get("TESSERA_API_KEY")
    try:
        model = _ask(f"{url}/v1/models", key)["data"][0]
        words = _words(url, key)
    except NoService as error:
        complain(f"{prog}: {error}")
        return 1
    except (LookupError, TypeError, ValueError) as error:
        complain(f"{prog}: {url} does not answer as Tessera does: {error}")
        return 1
    load = Load(
        words=words,
        model_name=model["id"],
        clients=options.clients,
        open_loop=options.rate is not None,
        warm=options.warm,
        seconds=options.seconds,
        encoding=options.encoding,
        key=key,
    )
    complain(f"{url}: {model['id']}, {options.seconds:g} s each after {options.warm:g} s")
    rows = []
    try:
        for workload in _chosen(options.workloads, model):
            for loop in options.rate or options.concurrency:
                outcome = drive(load, (url,), workload, loop)
                what = f"{loop:g} at once" if options.rate is None else f"{loop:g}/s"
                rows.append(_row(workload, what, outcome))
                complain("  ".join(rows[-1]))
    except RuntimeError as error:
        complain(f"{prog}: {error}")
        return 1
    except KeyboardInterrupt:
        say(table(HEADER, rows))
        return 130
    say(table(HEADER, rows))
    if options.csv is not None:
        write_csv(options.csv, HEADER, rows)
    return 0 if all(row[HEADER.index("errors")] == "0" for row in rows) else 1


def _parse(arguments: Sequence[str] | None, prog: str) -> argparse.Namespace:
    parser = OneLineParser(
        prog=prog,
        description="Loads a running service from processes of its own. Every eighth answer is checked while "
        "the load runs: unit vectors or a score for each input, the same as before for the same input. "
        "TESSERA_API_KEY is sent along.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--url", default=os.environ.get("TESSERA_URL", "http://127.0.0.1:8000"), help="of the service"
    )
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=WORKLOADS,
        metavar="NAME",
        default=["text-32", "text-128", "text-1024", "tile", "tile-again"],
        help=f"of {', '.join(WORKLOADS)}; images are left out for a model of text alone",
    )
    parser.add_argument("--concurrency", type=_positive, nargs="+", default=[1, 8, 64], help="connections")
    parser.add_argument("--rate", type=_positive, nargs="+", help="open loop: requests a second")
    parser.add_argument("--clients", type=_positive, default=2, help="client processes")
    parser.add_argument("--seconds", type=float, default=10.0, help="the window")
    parser.add_argument("--warm", type=float, default=2.0, help="seconds of load before each window")
    parser.add_argument("--encoding", choices=("base64", "float"), default="float", help="of the answers")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="the table as CSV as well")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _chosen(names: Sequence[str], model: dict[str, Any]) -> list[HttpWorkload]:
    """Raises ``RuntimeError`` when nothing is left for a model of text alone."""
    chosen = [WORKLOADS[name] for name in names]
    if not model.get("images", True):
        chosen = [workload for workload in chosen if workload.size is None]
    if not chosen:
        raise RuntimeError(f"{model['id']} reads text alone, and {', '.join(names)} are images")
    return chosen


def _row(workload: HttpWorkload, loop: str, outcome: Outcome) -> tuple[str, ...]:
    return (
        workload.name,
        loop,
        number(outcome.requests_rate),
        number(outcome.inputs_rate),
        *map(number, outcome.quantiles(0.5, 0.9, 0.99)),
        outcome.failed,
        str(outcome.checked),
    )


def _words(url: str, key: str | None) -> ServedWords:
    def tokens(texts: Sequence[str]) -> list[int]:
        answer = _ask(f"{url}/tokenize", key, {"input": list(texts)})
        rows = answer["data"] if len(texts) > 1 else [answer]
        return [row["count"] for row in rows]

    return ServedWords.ask(tokens)


def _ask(url: str, key: str | None, body: object = None) -> Any:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        hint = ": set TESSERA_API_KEY to a key that it knows" if error.code == 401 else ""
        raise NoService(f"{url} answered {error.code}{hint}") from error
    except OSError as error:
        raise NoService(no_answer(url, error)) from error
