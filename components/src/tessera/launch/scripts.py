"""The launch scripts of a checkout, and the environment that they make there."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tessera.launch.children import Signals, run
from tessera.launch.models import wanted_models
from tessera.launch.processes import without_source
from tessera.launch.report import Report
from tessera.launch.service import Service, status_of
from tessera.launch.settings import LaunchSettings, variables_help


@dataclass(frozen=True, slots=True)
class Script:
    """One of the launch scripts."""

    command: str
    text: str
    split: bool

    def help(self) -> str:
        return (
            f"usage: ./launch/{self.command}.sh [FLAG...]\n\n{self.text}"
            "All flags: .venv/bin/python -m tessera.worker --help\n"
            "The same with flags for everything: .venv/bin/tessera serve --help\n\n"
            f"Variables and their defaults:\n{variables_help(self.command)}"
        )


SCRIPTS: Final = {
    "agg": Script(
        "agg",
        "FRONTENDS frontends, and AGG_WORKERS aggregated workers: both stages in one process.\n"
        "Extra arguments go to the workers, for example --multimodal-embedding-cache-capacity-gb 10\n",
        split=False,
    ),
    "e_p": Script(
        "e_p",
        "FRONTENDS frontends, ENCODE_WORKERS encode workers and EMBED_WORKERS embed workers, each a process "
        "of its own.\n"
        "Any of the numbers may be 0: the rest then runs on other hosts, and EXPECT_ENCODE_WORKERS and\n"
        "EXPECT_EMBED_WORKERS tell the frontends how many there are in all.\n"
        "Extra arguments go to the embed workers, for example --multimodal-embedding-cache-capacity-gb 10\n",
        split=True,
    ),
}


def launch(
    script: Script,
    root: Path,
    flags: Sequence[str],
    *,
    prepared: bool = False,
    current: int | None = None,
) -> int:
    """Run the service until a signal ends it; the status that the script ends with.

    ``root`` is the repository, ``flags`` are the workers'. ``prepared`` says that this is the interpreter of
    the environment, which was made before; ``current`` is the id of the process that finds out whether it
    still is as it should be.
    """
    if not {"-h", "--help"}.isdisjoint(flags):
        sys.stdout.write(script.help())
        return 0
    signals = Signals()
    report = Report(os.environ.get("LOG_FORMAT", ""))

    def launched() -> None:
        given = LaunchSettings.read(os.environ)
        environment = without_source(os.environ, root)
        python = os.path.join(given.venv or root / ".venv", "bin", "python")
        several, wanted = wanted_models(given, split=script.split, worker=flags)
        service = Service(
            given,
            wanted,
            several=several,
            python=python,
            environment=environment,
            signals=signals,
            report=report,
        )
        if not prepared:
            service.check()
            # A host of frontends alone needs no torch.
            setup = [str(root / "scripts" / "setup"), "worker" if service.worker_count else "frontend"]
            _prepare(setup, environment, current, signals)
            if os.path.abspath(python) != os.path.abspath(sys.executable):
                signals.replaced()
                command = [python, "-S", "-m", "tessera.launch", "--root", str(root), "--prepared"]
                os.execv(python, [*command, script.command, *flags])
        service.run()

    return status_of(launched, report)


def _prepare(
    setup: Sequence[str], environment: Mapping[str, str], current: int | None, signals: Signals
) -> None:
    """Make the environment on first use, and again when what it is made from has changed.

    The process ``current`` ends with 0 where that is not needed. Raises ``Told``, and ``SystemExit`` when the
    environment cannot be made.
    """
    status = run(setup, environment, signals) if current is None or os.waitpid(current, 0)[1] else 0
    signals.wait(0)
    if status:
        raise SystemExit(status)
