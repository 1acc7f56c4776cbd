"""Confined processes try to leave their limits."""

from __future__ import annotations

import errno
import logging
import os
import platform
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from benchmarks.proc import children

from tessera.sandbox import Limits, Pool, ProcessLost, in_memory
from tessera.sandbox.memory import Memory
from tests.sandbox.attempts import ATTEMPTS, ENDS, folder
from tests.waiting import wait_until

pytestmark = pytest.mark.confines

ANSWERS = msgspec.msgpack.Decoder(str)
LIMITS = Limits(seconds=0.2, memory_bytes=1 << 28)


def start(limits: Limits = LIMITS, lost: Callable[[str], None] = lambda why: None) -> Pool[str]:
    return Pool(
        "test renderer",
        "tests.sandbox.attempts:Handler",
        "given",
        ANSWERS,
        limits,
        shared_bytes=4096,
        count=1,
        lost=lost,
    )


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool[str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", folder())
        pool = start()
    yield pool
    pool.close()


def attempt(pool: Pool[str], name: str, *, data: bytes = b"file") -> tuple[str, bytes]:
    """What became of it, and the beginning of the shared memory."""
    descriptor = in_memory(data, sealed=True)
    try:
        task = msgspec.msgpack.encode((name, os.getpid()))

        def read(answer: str, memory: Memory) -> tuple[str, bytes]:
            return answer, memory[:8].tobytes()

        return pool.call(task, descriptor, read, over=name)
    finally:
        os.close(descriptor)


def test_a_file_is_read_and_answered(pool: Pool[str]) -> None:
    assert attempt(pool, "read", data=b"content") == ("given 7", b"content\0")


def test_a_file_that_has_room_there_comes_in_the_shared_memory(pool: Pool[str]) -> None:
    def read(answer: str, memory: Memory) -> tuple[str, bytes]:
        return answer, memory[:8].tobytes()

    for data in (b"contents", b"anything"):
        task = msgspec.msgpack.encode(("read", 0))
        assert pool.call(task, data, read, over="read") == ("given 8", data)
    # The next file comes in a descriptor again.
    assert attempt(pool, "read", data=b"content")[0] == "given 7"


def test_a_file_in_the_shared_memory_goes_to_the_process_that_replaces_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", folder())
    pool = start()
    try:
        pid = pool.call(msgspec.msgpack.encode(("pid", 0)), b"", lambda answer, _: int(answer), over="pid")
        ended = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        # One that ends over the file would be the file's fault.
        assert select.select([ended], [], [], 10.0)[0]
        os.close(ended)
        task = msgspec.msgpack.encode(("read", 0))
        found = pool.call(task, b"contents", lambda answer, _: answer, over="read")
        assert found == "given 8"
    finally:
        pool.close()


@pytest.mark.parametrize("name", ATTEMPTS)
def test_what_a_confined_process_cannot_do(pool: Pool[str], name: str) -> None:
    refused = {
        "import": "ModuleNotFoundError",
        "thread": "RuntimeError",
    }.get(name, str(errno.EPERM))
    assert attempt(pool, name)[0] == refused
    assert attempt(pool, "read")[0] == "given 4"


def test_threads_where_a_decoder_needs_some_and_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", folder())
    pool = start(msgspec.structs.replace(LIMITS, threads=True))
    try:
        for name in ATTEMPTS:
            allowed = {"thread": "done", "clone3": str(errno.ENOSYS), "import": "ModuleNotFoundError"}
            assert attempt(pool, name)[0] == allowed.get(name, str(errno.EPERM)), name
    finally:
        pool.close()


@pytest.mark.parametrize("name", [*ENDS, "garbage"])
def test_a_process_that_ends_or_holds_is_replaced(pool: Pool[str], name: str) -> None:
    with pytest.raises(ProcessLost) as lost:
        attempt(pool, name)
    assert lost.value.why == ("timeout" if name in ("sleep", "spin") else "crash")
    assert attempt(pool, "read")[0] == "given 4"


def test_a_file_is_not_to_blame_for_a_process_that_ended_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", folder())
    lost: list[str] = []
    others = set(children(os.getpid()))
    pool = start(lost=lost.append)
    try:
        (server,) = set(children(os.getpid())) - others
        for count in (1, 2):
            (process,) = children(server)
            os.kill(process, signal.SIGKILL)
            state = Path(f"/proc/{process}/stat")
            wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "Z")  # noqa: B023
            assert attempt(pool, "read")[0] == "given 4"
            assert lost == ["crash"] * count
    finally:
        pool.close()


def test_a_fork_server_that_is_just_being_killed_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is seen at its socket, at its status or at a process that it forked, whichever comes first."""
    monkeypatch.setenv("PYTHONPATH", folder())
    others = set(children(os.getpid()))
    pool = start()
    try:
        for _ in range(10):
            (server,) = set(children(os.getpid())) - others
            os.kill(server, signal.SIGKILL)

            def replaced(server: int = server) -> bool:
                # What was asked of those that end with it goes to the next ones.
                assert attempt(pool, "read")[0] == "given 4"
                return bool(set(children(os.getpid())) - others - {server})

            wait_until(replaced)
    finally:
        pool.close()


WITHOUT_SECCOMP = """
import ctypes, struct, sys
if "tessera.sandbox.child" in sys.orig_argv:
    from tessera.sandbox import seccomp as s
    program = b"".join([
        s._instruction(s._LOAD, s._NUMBER), s._instruction(s._IF_EQUAL, {prctl}, 0, 3),
        s._instruction(s._LOAD, s._ARGUMENTS), s._instruction(s._IF_EQUAL, 22, 0, 1),
        s._instruction(s._RETURN, 0x00050000 | {error}), s._instruction(s._RETURN, s._ALLOW),
    ])
    ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
    assert not s._set(ctypes.pointer(s._Program(len(program) // 8, program)))
"""


def test_without_seccomp_the_other_limits_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a kernel that answers as one that was built without it."""
    prctl = 157 if platform.machine() == "x86_64" else 167
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_SECCOMP.format(prctl=prctl, error=errno.EINVAL))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{folder()}")
    with caplog.at_level(logging.WARNING):
        pool = start()
    try:
        said = [record.message for record in caplog.records]
        assert len(said) == 1 and "no seccomp" in said[0] and "test renderer" in said[0]
        assert attempt(pool, "read a file")[0] == "done"
        assert attempt(pool, "write a file")[0] == "done"
        with pytest.raises(ProcessLost):
            attempt(pool, "sleep")
    finally:
        pool.close()


def test_a_process_that_others_hold_up_is_waited_for(pool: Pool[str]) -> None:
    # Twice the processor time that it has, by the clock, and none of it used.
    assert attempt(pool, "pause")[0] == "rested"
