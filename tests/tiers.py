"""Which tests run when, which share a process, and which begin: one table for all of it.

A test that has none of these markers belongs to every tier. A tier holds those below it::

    scripts/check     what a developer runs all day; families are held to vectors that are carried here
    scripts/test      and what starts services, browsers, clients and commands, or compares with libraries
    scripts/test all  everything, as CI does

Tests of one ``xdist_group`` run in one process, so that what they share is made once: a service, compiled
engines. A file without the marker is a group of its own. Two processors are kept busy by four processes of
tests, because what starts services or waits for a lease leaves one idle for much of its time.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.groups import group_of

TIERS = ("check", "test", "all")

# The first tier that runs the marker's tests, and what the marker says of them.
MARKERS = {
    "service": ("test", "starts the service or processes of it, a browser, or servers that it needs"),
    "starts": (
        "test",
        "starts commands, decoders or readers of tables, a second and more of a processor",
    ),
    "parity": ("test", "compares with models of libraries, which take seconds to import"),
    "compiles": ("all", "compiles, builds or exports engines"),
    "images": ("all", "makes images and runs them, or makes what one or a bundle holds"),
    "installs": ("all", "waits for an environment of its own"),
    "measures": ("all", "runs a benchmark, which loads a service of its own for as long as it can"),
    "fuzzes": ("all", "tries hundreds of requests, or variations of files, that nobody wrote"),
    "operates": (
        "all",
        "runs a scheduler's job or a monitoring server around a service of its own, or changes its models",
    ),
    "kserve": ("all", "asks frontends of its own by KServe v2"),
    "trains": ("all", "trains a model, or makes many scenes for it"),
    "confines": ("all", "decodes or draws what is hostile in confined processes of its own, many of them"),
    "embeds": ("all", "embeds a corpus by the command, with engines of its own"),
    "several": ("all", "serves several models, with workers for each"),
    "large": ("all", "sends hundreds of megabytes through a service of its own"),
    "soak": ("all", "keeps the service under load for minutes"),
    "leaves": ("all", "ends calls to a service in this process at each of their suspensions"),
    "kills": ("all", "kills a process that writes, again and again"),
    "gpu": ("all", "needs a CUDA device"),
}

# The longest groups, the longest first by the times of a whole run, so that nobody is left with one at the
# end: names of an xdist_group, or files. The other files with services follow, then all other files, then
# what waits for an installation and is short.
FIRST = (
    "containers",
    "images",
    "corpus",
    "aoti",
    "shared-service",
    "faults",
    # One after another, because each of its services watches discovery in many places: a machine allows 128
    # inotify instances, of which a frontend takes four for each model.
    "several",
    "clients",
    "corpus-ray",
    # Waits for the index, while the others compute.
    "wheel",
    "cancellation/test_suspensions.py",
    "benchmarks/test_cost.py",
    "onnx",
    "e2e/faults/test_reranking.py",
    "e2e/test_parity.py",
    "e2e/test_launch.py",
    "slurm",
    "e2e/test_model_options.py",
    "e2e/test_families.py",
    "e2e/faults/test_planes.py",
    "soak-nixl",
    # Their environments are there by now.
    "retriever",
    "recipes",
    "tessera_kserve/test_grpc_door.py",
    "e2e/test_token_vectors.py",
    "test_request_path.py",
    "benchmarks/test_all.py",
    "e2e/faults/test_hosts.py",
    "models/llama_nemotron_vl/test_parity.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, default="all", help="which tests run, see tests/tiers.py")


def pytest_configure(config: pytest.Config) -> None:
    for name, (tier, meaning) in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning} ({tier})")


# The assignment of a file, to the empty line behind it.
_FILE_MARKS = re.compile(r"^pytestmark = (?:.+\n)+", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out a file whose ``pytestmark`` keeps all its tests out of the tier.

    Its imports are left out with it: all of them took 3 s of processor time in each process.
    """
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    found = _FILE_MARKS.search(collection_path.read_text(encoding="utf-8"))
    names = re.findall(r"pytest\.mark\.(\w+)", found[0]) if found else []
    most = TIERS.index(config.getoption("tier"))
    return any(TIERS.index(MARKERS[name][0]) > most for name in names if name in MARKERS) or None


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("xdist_group") is None:
        item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0].removeprefix("tests/")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if " at 0x" in item.nodeid:
            # The processes that share the tests would have other names for it, and run none.
            raise pytest.UsageError(f"{item.nodeid}: an address is in its name; give the cases ids")
    most = TIERS.index(config.getoption("tier"))
    left_out = [item for item in items if TIERS.index(tier_of(item)) > most]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if TIERS.index(tier_of(item)) <= most]
    items.sort(key=_place)


def tier_of(item: pytest.Item) -> str:
    """The first tier that runs a test."""
    tiers = [tier for name, (tier, _) in MARKERS.items() if item.get_closest_marker(name) is not None]
    return max(tiers, key=TIERS.index, default=TIERS[0])


def _place(item: pytest.Item) -> tuple[int, bool]:
    """What to sort tests by: the place of the group, then the place in it."""
    group = group_of(item)
    waits = item.get_closest_marker("installs") is not None
    if group in FIRST:
        return FIRST.index(group), waits
    serves = item.get_closest_marker("service") is not None
    return len(FIRST) + (2 if waits else 0 if serves else 1), waits
