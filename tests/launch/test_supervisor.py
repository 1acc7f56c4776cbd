"""The supervisor with processes that do nothing: signals, restarts, and the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from benchmarks.proc import children

from tessera.launch import bound
from tests.e2e.service import default_signals
from tests.proc import command_line
from tests.signals import freeze
from tests.waiting import wait_until

_PROGRAM = """
import json, os, pathlib, sys
from tessera.launch.children import Signals, Told
from tessera.launch.report import Report
from tessera.launch.supervisor import Supervisor
signals = Signals()
if "reread" in sys.argv:
    signals.rereads = True
supervisor = Supervisor(signals, Report("text"), 1)
for name, role, *command in json.loads(sys.argv[1]):
    if role == "other":
        supervisor.start_other(command, os.environ, pathlib.Path(name))
    else:
        supervisor.start(name, role, command, os.environ)
def beside():
    if signals.told_to_reread:
        signals.told_to_reread = False
        print("told", file=sys.stderr)
        supervisor.leave([child for child in supervisor.children if child.name.startswith("leaving")])
        supervisor.tell("frontend", 15)
try:
    supervisor.supervise(beside)
except Told as told:
    supervisor.stop()
    sys.exit(told.status)
"""

SLEEP = ["sleep", "1000"]
# Says that it ends, and takes a moment to.
SLOW = ["bash", "-c", "trap 'echo $0 ends >&2; sleep 0.3; exit 0' TERM; while :; do sleep 0.05; done"]
STUBBORN = ["bash", "-c", "trap '' TERM; while :; do sleep 0.05; done"]


@contextmanager
def supervising(
    tmp_path: Path,
    commands: Sequence[Sequence[str]],
    *more: str,
    ignored: Sequence[signal.Signals] = (),
    new_session: bool = True,
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    def signals() -> None:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(commands), *more],
            stderr=output,
            preexec_fn=signals,
            # Without a terminal, whatever the tests are run from.
            start_new_session=new_session,
        )
    try:
        wait_until(lambda: len(children(process.pid)) == len(commands))
        yield process, log
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        process.wait(60)


def ignored_by(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("SigIgn")).split()[1], 16)


def bit(number: signal.Signals) -> int:
    return 1 << (number - 1)


def test_children_ignore_what_a_terminal_sends_and_nothing_else(tmp_path: Path) -> None:
    with supervising(tmp_path, [["one", "agg", *SLEEP]]) as (process, _):
        (child,) = children(process.pid)
        wait_until(lambda: command_line(child) == SLEEP)
        ignored = ignored_by(child)
        for number in signal.valid_signals():
            if number in (signal.SIGINT, signal.SIGHUP):
                assert ignored & bit(signal.Signals(number))
            elif number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD, signal.SIGXFSZ):
                assert not ignored & bit(signal.Signals(number))
        assert "SigBlk:\t0000000000000000" in Path(f"/proc/{child}/status").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_has_its_status(tmp_path: Path, number: signal.Signals) -> None:
    with supervising(tmp_path, [["one", "agg", *SLEEP]]) as (process, _):
        process.send_signal(number)
        assert process.wait(60) == 128 + number


def test_what_is_ignored_from_the_start_stays_so(tmp_path: Path) -> None:
    with supervising(tmp_path, [["one", "agg", *SLEEP]], ignored=[signal.SIGHUP]) as (process, _):
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


def test_they_end_in_their_order_and_a_second_signal_changes_nothing(tmp_path: Path) -> None:
    commands = [
        [name, role, *SLOW, name] for name, role in [("c", "encode"), ("b", "embed"), ("a", "frontend")]
    ]
    beside = tmp_path / "beside"
    commands.insert(0, [str(beside), "other", *SLOW, "it"])
    with supervising(tmp_path, commands) as (process, log):
        # Until each has come to its loop.
        wait_until(lambda: all(children(pid) for pid in children(process.pid)))
        process.send_signal(signal.SIGINT)
        wait_until(lambda: "a ends" in log.read_text())
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
        assert log.read_text().split() == ["a", "ends", "b", "ends", "c", "ends"]
        assert beside.read_text() == "it ends\n" and beside.stat().st_mtime > log.stat().st_mtime


def test_what_does_not_end_is_killed_and_what_is_frozen_ends(tmp_path: Path) -> None:
    commands = [["one", "agg", *STUBBORN], ["two", "frontend", *SLEEP]]
    with supervising(tmp_path, commands) as (process, log):
        stubborn, frozen = children(process.pid)
        wait_until(lambda: bool(ignored_by(stubborn) & bit(signal.SIGTERM)))
        # Until a child runs its program, whoever starts it waits for it.
        wait_until(lambda: command_line(frozen) == SLEEP)
        freeze(frozen)
        process.terminate()
        assert process.wait(60) == 143
        assert log.read_text() == "tessera: killing what has not ended after 1 s\n"


def test_a_child_that_keeps_ending_waits_longer_each_time(tmp_path: Path) -> None:
    with supervising(tmp_path, [["one", "agg", "sh", "-c", "sleep 0.05; exit 3"]]) as (_, log):
        wait_until(lambda: log.read_text().count("ended") == 3)
        assert [line.rpartition(" in ")[2] for line in log.read_text().splitlines()] == ["1 s", "2 s", "4 s"]
        assert "ended with status 3; starting it again" in log.read_text()


def test_a_program_that_has_gone_is_looked_for_again(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o755)
    with supervising(tmp_path, [["one", "agg", str(program)]]) as (process, log):
        (child,) = children(process.pid)
        wait_until(lambda: command_line(child) == SLEEP)
        program.rename(tmp_path / "away")
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: "No such file" in log.read_text())
        (tmp_path / "away").rename(program)
        wait_until(lambda: [command_line(pid) for pid in children(process.pid)] == [SLEEP])


def test_what_is_told_to_leave_is_not_started_again_and_killed_in_the_end(tmp_path: Path) -> None:
    commands = [["leaving 1", "agg", *STUBBORN], ["leaving 2", "agg", *SLEEP], ["stays", "agg", *SLEEP]]
    with supervising(tmp_path, commands, "reread") as (process, log):
        stubborn, _, stays = children(process.pid)
        wait_until(lambda: bool(ignored_by(stubborn) & bit(signal.SIGTERM)))
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: children(process.pid) == [stays])
        killed = "tessera: killing leaving 1, which has not ended after 1 s\n"
        assert log.read_text() == f"told\n{killed}"
        os.kill(stays, signal.SIGKILL)
        wait_until(lambda: "stays (pid" in log.read_text())


def test_one_role_is_told_alone(tmp_path: Path) -> None:
    commands = [["a", "frontend", *SLEEP], ["b", "agg", *SLEEP]]
    with supervising(tmp_path, commands, "reread") as (process, log):
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: "a (pid" in log.read_text())
        assert "b (pid" not in log.read_text()


def test_a_terminal_that_is_closed_ends_what_reads_its_file_again_too(tmp_path: Path) -> None:
    def told() -> int:
        return log.read_text().count("told")

    # A session of its own, on a terminal of its own.
    master, slave = os.openpty()
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _ON_A_TERMINAL, _PROGRAM, json.dumps([["one", "agg", *SLEEP]])],
            stdin=slave,
            stderr=output,
            start_new_session=True,
            # It is ignored where the tests themselves run under nohup.
            preexec_fn=default_signals,
        )
    try:
        os.close(slave)
        wait_until(lambda: bool(children(process.pid)))
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: told() == 1)
        os.close(master)
        assert process.wait(60) == 128 + signal.SIGHUP
        assert told() == 1
    finally:
        process.kill()
        process.wait()


_ON_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:], "reread"])
"""


def test_what_kills_the_launcher_ends_its_children(tmp_path: Path) -> None:
    commands = [
        ["one", "agg", *STUBBORN],
        ["two", "frontend", *SLEEP],
        [str(tmp_path / "out"), "other", *SLEEP],
    ]
    with supervising(tmp_path, commands) as (process, _):
        started = children(process.pid)
        wait_until(lambda: all("bound.py" not in " ".join(command_line(pid)) for pid in started))
        freeze(started[0])
        process.kill()
        process.wait(60)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))


def test_a_child_whose_launcher_has_gone_does_not_begin(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    words = [sys.executable, "-I", "-S", bound.__file__, "1", "/usr/bin/touch", "touch", str(begun)]
    assert subprocess.run(words, timeout=180).returncode == 0
    words[4] = str(os.getpid())
    assert not begun.exists() and subprocess.run(words, timeout=180).returncode == 0
    assert begun.exists()
