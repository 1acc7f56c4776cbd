"""Which tests share a process when several run them, and which begin.

Two processors are kept busy by three processes of tests, because what starts services or waits for a lease
leaves one idle for much of its time. What takes longest begins, so that nobody is left with it at the end.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling

# What a group's tests share is made once: a service, compiled engines, environments. In this order.
_MEMBERS = {
    "images": (
        "deploy/test_images.py",
        "deploy/test_offline.py",
        "deploy/test_worker_images.py",
        "deploy/test_wheels.py",
    ),
    "faults": (
        "e2e/faults/test_processes.py",
        "e2e/faults/test_hand_off.py",
        "e2e/faults/test_clients.py",
        "e2e/faults/test_soak.py shm",
    ),
    "compiled": ("engine/aoti/",),
    # Waits for what is installed beside the other tests.
    "aiperf": ("clients/test_aiperf.py",),
    "clients": ("clients/",),
    # Those that ask the service of tests/conftest.py; the last also wait for what is installed.
    "service": (
        "e2e/test_traces.py",
        "e2e/test_logs.py",
        "examples/",
        "page/",
        "dynamo_model/",
    ),
}

# The longest first; then the other files with services, then all other files.
_FIRST = (
    "images",
    "faults",
    "e2e/faults/test_soak.py nixl",
    "compiled",
    "e2e/faults/test_planes.py",
    "e2e/test_launch.py",
    "e2e/faults/test_hosts.py",
    "e2e/test_parity.py",
    "service",
    "models/llama_nemotron_vl/test_parity.py",
    "engine/test_onnx.py",
    "engine/test_triton_repository.py",
)
_LAST = "aiperf"


class GroupScheduling(LoadScopeScheduling):
    """Gives whole groups to processes, in the order in which their tests were collected."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(nodeid: str) -> str:
    """The name of a test's group; one that belongs to none is with its file's."""
    name = _name(nodeid)
    return next((group for group, members in _MEMBERS.items() if name.startswith(members)), name)


def place_of(item: pytest.Item) -> tuple[int, int]:
    """What to sort tests by: the place of the group, then the place in it."""
    group, name = group_of(item.nodeid), _name(item.nodeid)
    if group in _FIRST:
        place = _FIRST.index(group)
    elif group == _LAST:
        place = len(_FIRST) + 2
    else:
        place = len(_FIRST) + (item.get_closest_marker("e2e") is None)
    members = _MEMBERS.get(group, ())
    return place, next((number for number, member in enumerate(members) if name.startswith(member)), 0)


def _name(nodeid: str) -> str:
    """The test's file; each soak is by itself, since the second one has a service of its own."""
    file, _, test = nodeid.removeprefix("tests/").partition("::")
    return f"{file} {test.rpartition('[')[2].removesuffix(']')}" if file.endswith("test_soak.py") else file
