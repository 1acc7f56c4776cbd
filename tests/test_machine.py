"""What a process may use: limits of control groups as kernels write them, cards as nvidia-smi lists them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tessera import machine
from tessera.machine import Card, read_gpus, visible

GIB = 1 << 30
CORES = len(os.sched_getaffinity(0))


def host(root: Path, files: dict[str, str]) -> Path:
    """A file system with 64 GiB of memory and these files."""
    every = {"proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {32 << 20} kB\n"} | files
    for name, text in every.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = "proc/self/cgroup", "0::/service/worker\n"
V1 = "proc/self/cgroup", "5:memory:/outside/box\n4:cpu,cpuacct:/outside/box\n1:name=systemd:/\n"
GROUP = "sys/fs/cgroup"


def test_without_limits_it_is_the_affinity_and_all_of_the_memory(tmp_path: Path) -> None:
    root = host(tmp_path, dict([V2]) | {f"{GROUP}/service/worker/cpu.max": "max 100000\n"})
    assert machine.cores(root) == CORES
    assert (machine.memory_bytes(root), machine.free_memory_bytes(root)) == (64 * GIB, 32 * GIB)


@pytest.mark.parametrize(
    ("group", "quota", "cores"),
    [
        ("service/worker", "100000 100000", 1),
        ("service", "150000 100000", 1),
        ("", "50000 100000", 1),
        ("service", f"{(CORES + 3) * 100_000} 100000", CORES),
        ("service", "max 100000", CORES),
    ],
)
def test_the_least_quota_of_v2_counts(tmp_path: Path, group: str, quota: str, cores: int) -> None:
    root = host(
        tmp_path, dict([V2]) | {f"{GROUP}/{group}/cpu.max": f"{quota}\n", f"{GROUP}/service/worker/x": ""}
    )
    assert machine.cores(root) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", CORES), ("100000", 1), ("30000", 1)])
def test_the_quota_of_v1_counts(tmp_path: Path, quota: str, cores: int) -> None:
    # A container of v1 sees its own group at the top, under the name that it has outside.
    files = {
        f"{GROUP}/cpu,cpuacct/cpu.cfs_quota_us": quota,
        f"{GROUP}/cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    assert machine.cores(host(tmp_path, dict([V1]) | files)) == cores


def test_the_memory_that_is_left_in_a_group_of_v2(tmp_path: Path) -> None:
    files = {
        f"{GROUP}/service/memory.max": f"{8 * GIB}\n",
        f"{GROUP}/service/memory.current": f"{7 * GIB}\n",
        f"{GROUP}/service/memory.stat": f"anon {4 * GIB}\ninactive_file {2 * GIB}\n",
        f"{GROUP}/service/worker/memory.max": "max\n",
    }
    root = host(tmp_path, dict([V2]) | files)
    assert (machine.memory_bytes(root), machine.free_memory_bytes(root)) == (8 * GIB, 3 * GIB)


def test_the_memory_that_is_left_in_a_group_of_v1(tmp_path: Path) -> None:
    files = {
        f"{GROUP}/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
        f"{GROUP}/memory/memory.usage_in_bytes": f"{7 * GIB}\n",
        f"{GROUP}/memory/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}\n",
    }
    root = host(tmp_path, dict([V1]) | files)
    assert (machine.memory_bytes(root), machine.free_memory_bytes(root)) == (8 * GIB, 2 * GIB)
    (root / f"{GROUP}/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert machine.memory_bytes(root) == 64 * GIB


def test_affinity_counts() -> None:
    one = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})"
    program = f"{one}; from tessera import machine; print(machine.cores())"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout == b"1\n"


def test_this_machine_has_something() -> None:
    found = machine.this_machine({"CUDA_VISIBLE_DEVICES": ""})
    assert 1 <= found.cores <= CORES and found.nbytes > GIB and found.cards == ()
    assert machine.free_memory_bytes() <= found.nbytes


# As the driver of two H200 answers, and one of an A100 that is cut up beside a whole one.
H200 = "NVIDIA H200, GPU-aaaa-1, 143771, Disabled\nNVIDIA H200, GPU-aabb-2, 143771, Disabled\n"
A100 = "NVIDIA A100-SXM4-40GB, GPU-cccc, 40960, Enabled\nNVIDIA A100-SXM4-40GB, GPU-dddd, 40960, Disabled\n"
CUT = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-cccc)
  MIG 3g.20gb     Device  0: (UUID: MIG-1111)
  MIG 1g.5gb+me   Device  1: (UUID: MIG-2222)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-dddd)
"""


def entries(query: str, listed: str, named: str | None) -> list[str]:
    return [card.entry for card in visible(read_gpus(query, listed), named)]


@pytest.mark.parametrize(
    ("named", "found"),
    [
        (None, ["0", "1"]),
        ("1", ["1"]),
        ("1,0", ["1", "0"]),
        ("GPU-aabb", ["GPU-aabb"]),
        # What is no card hides the rest, and so does one that is named twice.
        ("0,-1,1", ["0"]),
        ("0,7", ["0"]),
        ("0,0", ["0"]),
        ("NoDevFiles", []),
    ],
)
def test_cards_are_those_that_are_visible(named: str | None, found: list[str]) -> None:
    assert entries(H200, "", named) == found


def test_a_card_has_its_name_and_its_memory() -> None:
    assert visible(read_gpus(H200, ""), "1") == (Card(entry="1", name="H200", nbytes=143_771 << 20),)


def test_memory_that_is_shared_with_the_processor_is_unknown() -> None:
    (card,) = visible(read_gpus("NVIDIA GB10, GPU-ee, [N/A], [N/A]\n", ""), None)
    assert (card.name, card.nbytes) == ("GB10", 0)


def test_each_part_of_a_card_that_is_cut_up_is_a_card() -> None:
    assert entries(A100, CUT, None) == ["MIG-1111", "MIG-2222", "1"]
    assert [card.nbytes // GIB for card in visible(read_gpus(A100, CUT), None)] == [20, 5, 40]
    assert entries(A100, CUT, "MIG-2222,1") == ["MIG-2222", "1"]
    (first,) = visible(read_gpus(A100, CUT), "0")
    assert (first.entry, first.name) == ("0", "MIG 3g.20gb")


def test_where_nvidia_smi_says_nothing_there_are_no_cards() -> None:
    assert read_gpus("No devices were found\n", "") == []
