"""The launch scripts of a checkout, and the environment that they make there."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tessera.launch.children import Signals, run
from tessera.launch.models import wanted_models
from tessera.launch.processes import without_source
from tessera.launch.report import Report
from tessera.launch.service import Service, status_of
from tessera.launch.settings import LaunchSettings, log_format_of, variables_help
from tessera.launch.variables import (
    encode_flags,
    out_of_date,
    process_words,
    unknown,
    without_settings,
)


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
        "TESSERA_FRONTENDS frontends, and TESSERA_AGG_WORKERS aggregated workers: both stages in a process.\n"
        "Extra arguments go to the workers, for example --multimodal-embedding-cache-capacity-gb 10\n",
        split=False,
    ),
    "e_p": Script(
        "e_p",
        "TESSERA_FRONTENDS frontends, TESSERA_ENCODE_WORKERS encode workers and TESSERA_EMBED_WORKERS embed\n"
        "workers, each a process of its own.\n"
        "Any of the numbers may be 0: the rest then runs on other hosts, and\n"
        "TESSERA_EXPECT_ENCODE_WORKERS and TESSERA_EXPECT_EMBED_WORKERS tell the frontends how many\n"
        "there are in all.\n"
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
    report = Report(log_format_of(os.environ))

    def launched() -> None:
        given = LaunchSettings.read(os.environ)
        environment = without_source(os.environ, root)
        python = os.path.join(given.venv or root / ".venv", "bin", "python")
        frontend, worker = _from_variables(report, prepared=prepared)
        given = replace(given, passed=tuple(frontend))
        several, wanted = wanted_models(
            given, split=script.split, worker=[*worker, *flags], encode_worker=encode_flags(worker)
        )
        service = Service(
            given,
            wanted,
            several=several,
            python=python,
            environment=without_settings(environment),
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


def _from_variables(report: Report, *, prepared: bool) -> tuple[list[str], list[str]]:
    """The flags of frontends and of workers that variables give; says which variables are none.

    Nothing before the environment is made, which then is looked at again.
    """
    if not prepared:
        for sentence in out_of_date(os.environ, LaunchSettings, scripts=True):
            report.warn(sentence)
    try:
        words = process_words(os.environ)
        for sentence in unknown(os.environ):
            report.warn(sentence)
        return words
    except ImportError:
        return [], []


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
