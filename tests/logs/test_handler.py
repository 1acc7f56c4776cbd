"""Lines that are written behind: none is lost, none is late, none says what came later."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

from tessera import logs
from tests.waiting import wait_until

BEGIN = """
import logging, os, signal, sys, threading
from tessera.logs import log_as, write_behind, serving, RequestLine
log_as("embed")
write_behind()
log = logging.getLogger("tessera.example")
"""


def run(program: str) -> tuple[int, list[str]]:
    """The exit status, and what follows the name of the logger in each line."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program], capture_output=True, text=True, timeout=180
    )
    return done.returncode, [line.split("tessera.example: ")[-1] for line in done.stderr.splitlines()]


@pytest.mark.parametrize(
    ("end", "status", "last"),
    [
        ("", 0, []),
        ("sys.exit(3)", 3, []),
        ("from tessera.process_exit import leave; leave(4)", 4, []),
        ("log.error('broken'); os._exit(5)", 5, ["broken"]),
        ("log.critical('broken'); os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ["broken"]),
    ],
)
def test_all_lines_are_there_at_the_end_of_a_process(end: str, status: int, last: list[str]) -> None:
    begin = "for number in range(500): log.info('line %d', number)\n"
    found = run(begin + end)
    assert found == (status, [*(f"line {number}" for number in range(500)), *last])


def test_an_uncaught_exception_comes_after_what_was_said_before() -> None:
    status, found = run("log.info('before'); raise RuntimeError('the end')")
    assert status == 1 and found[0] == "before" and "uncaught RuntimeError" in found[1]
    assert "RuntimeError: the end" in found[-1]


def test_a_fork_takes_no_line_along_and_its_own_are_written() -> None:
    status, found = run(
        """
for number in range(50): log.info("line %d", number)
if (child := os.fork()) == 0:
    log.info("from the child")
    os._exit(0)
os.waitpid(child, 0)
log.info("after the fork")
"""
    )
    assert status == 0 and found.count("from the child") == 1
    found.remove("from the child")
    assert found == [*(f"line {number}" for number in range(50)), "after the fork"]


def test_a_line_says_what_was_so_when_it_was_logged() -> None:
    _, found = run(
        """
names = ["one"]
with serving(RequestLine("its-request")):
    log.info("names %s", names, extra={"fields": {"n": 1}})
log.info("outside")
with serving(RequestLine("another")):
    names.append("two")
    log.info("names %s", names)
    logging.getLogger().handlers[0].flush()
"""
    )
    assert found == [
        "names ['one'] request_id=its-request n=1",
        "outside",
        "names ['one', 'two'] request_id=another",
    ]


def test_threads_keep_their_own_order() -> None:
    _, found = run(
        """
def say(name):
    for number in range(2000): log.info("%s %d", name, number)
threads = [threading.Thread(target=say, args=(name,)) for name in "abcd"]
for each in threads: each.start()
for each in threads: each.join()
"""
    )
    assert len(found) == 8000
    for name in "abcd":
        assert [line for line in found if line.startswith(name)] == [f"{name} {n}" for n in range(2000)]


def test_a_line_is_seen_while_the_process_goes_on() -> None:
    program = "log.info('here'); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN + program], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().endswith(b"tessera.example: here\n")
        process.communicate()


def test_nobody_reads_and_the_process_goes_on(tmp_path: Path) -> None:
    read, write = os.pipe()
    done = tmp_path / "done"
    # More than a pipe takes, and more than may wait.
    program = f"for number in range(30_000): log.info('line %d', number)\nopen({str(done)!r}, 'x').close()\n"
    program += "sys.stdin.read(); log.info('the last')"
    with subprocess.Popen(
        [sys.executable, "-c", BEGIN + program], stdin=subprocess.PIPE, stderr=write
    ) as process:
        os.close(write)
        wait_until(done.exists, process=process)
        written = b""
        # What waits is written now; then the process may end.
        while select.select([read], [], [], 0.5)[0]:
            written += os.read(read, 1 << 16)
        process.communicate()
        while more := os.read(read, 1 << 16):
            written += more
    os.close(read)
    lines = written.decode().splitlines()
    numbers = [int(line.split()[-1]) for line in lines if "example: line " in line]
    assert 10_000 <= len(numbers) < 30_000 and numbers == sorted(set(numbers))
    (said,) = (line for line in lines if "left out" in line)
    left_out = re.search(r"WARNING tessera: (\d+) lines were left out", said)
    assert left_out is not None and int(left_out[1]) == 30_000 - len(numbers)
    assert lines[-1].endswith("the last")


def test_a_write_is_no_larger_than_a_pipe_takes_whole() -> None:
    sizes: list[int] = []

    class Stream(StringIO):
        def write(self, text: str) -> int:
            sizes.append(len(text))
            return super().write(text)

    handler = logs.LineHandler(stream := Stream())
    handler.setFormatter(logs.TextFormatter("embed"))
    handler.write_behind()
    record = logs.Line(
        logs.logging.getLogger("tessera.x"), 20, "word " * 20, {"request_id": "a"}, created=0.0
    )
    for _ in range(300):
        handler.handle(record)
    handler.close()
    assert len(stream.getvalue().splitlines()) == 300
    assert max(sizes) <= select.PIPE_BUF and len(sizes) < 30
