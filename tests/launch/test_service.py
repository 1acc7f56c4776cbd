"""Where a service puts the workers of several models, on a machine that has cards in name alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tessera.launch import service
from tessera.launch.children import Signals
from tessera.launch.models import Deployed, WantedModel
from tessera.launch.processes import Process
from tessera.launch.report import Report
from tessera.launch.service import Service
from tessera.launch.settings import LaunchSettings, SettingError
from tessera.machine import Card, Machine
from tessera.worker.settings import WorkerSettings, parse
from tests.e2e.service import free_ports

pytestmark = pytest.mark.operates

GIB = 1 << 30
CARDS = tuple(Card(entry=f"GPU-{at}", name="H200", nbytes=140 * GIB) for at in range(2))


@pytest.fixture
def signals() -> Iterator[Signals]:
    """The launcher's, which are put back: tests that follow start processes of their own."""
    import signal

    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in numbers}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield Signals()
    for number, handler in before.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def wanted(name: str, checkpoint: Path, base: int, *worker: str, **given: str) -> WantedModel:
    values = {
        "TESSERA_MODEL_PATH": str(checkpoint),
        "TESSERA_SERVED_MODEL_NAME": name,
        "TESSERA_SYSTEM_PORT_BASE": str(base),
    }
    settings = LaunchSettings.read(values | given)
    return WantedModel.one_of_several(
        settings, split="TESSERA_ENCODE_WORKERS" in given, worker=worker, said=name
    )


class Placing:
    """A service of which nothing but its processes is looked at."""

    def __init__(self, signals: Signals, base: int, *models: WantedModel, several: bool = True) -> None:
        settings = LaunchSettings.read({"TESSERA_SYSTEM_PORT_BASE": str(base), "TESSERA_FRONTENDS": "1"})
        self.service = Service(
            settings,
            models,
            several=several,
            python=sys.executable,
            environment=dict(os.environ),
            signals=signals,
            report=Report("text"),
        )

    def place(self, *new: WantedModel, leaving: tuple[str, ...] = ()) -> list[Deployed]:
        """The models that are there from the start, or those that are added, with their places."""
        found = self.service
        here = {model.name: model for model in found.models}
        others = [model for name, model in here.items() if new and name not in leaving]
        models = [found.deployed(one, [each.slot for each in found.models]) for one in new] or found.models
        try:
            found._finish(found.place(models, others, [here[name] for name in leaving]))
        finally:
            found._stop()
            found._folders, found._made = None, {}
        return list(models)

    def found(self) -> list[Deployed]:
        """The models that are there from the start, once it is known what they are."""
        for model in self.service.models:
            self.service._finish(self.service.find(model))
        return self.place()

    def workers(self, model: Deployed) -> list[tuple[Process, WorkerSettings]]:
        found = self.service._processes_of(model)
        return [(process, parse(process.arguments[2:])) for process in found]


def test_workers_are_spread_and_told_their_shares(
    checkpoint: Path, signals: Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(cores=16, nbytes=64 * GIB, cards=CARDS)
    monkeypatch.setattr(service, "this_machine", lambda environment: machine)
    monkeypatch.setattr(service, "free_memory_bytes", lambda: 60 * GIB)
    (base,) = free_ports(8)[:1]
    one = wanted(
        "one", checkpoint, base, "--multimodal-embedding-cache-capacity-gb=8", TESSERA_AGG_WORKERS="1"
    )
    two = wanted("two", checkpoint, base, TESSERA_ENCODE_WORKERS="1", TESSERA_EMBED_WORKERS="2")
    placing = Placing(signals, base, one, two)
    models = placing.place()
    found = [worker for model in models for worker in placing.workers(model)]
    assert [process.name for process, _ in found] == [
        *("agg worker 0 of one", "encode worker 0 of two", "embed worker 0 of two"),
        "embed worker 1 of two",
    ]
    cards = [process.environment["CUDA_VISIBLE_DEVICES"] for process, _ in found]
    assert cards == ["GPU-0", "GPU-1", "GPU-0", "GPU-1"]
    ports = [int(process.environment["DYN_SYSTEM_PORT"]) for process, _ in found]
    assert ports == list(range(base, base + 4))
    assert {process.environment["DYN_NAMESPACE"] for process, _ in found} == {"tessera-one", "tessera-two"}
    assert [worker.card_workers for _, worker in found] == [2, 2, 2, 2]
    # The large cache is not divided by three.
    shares = [worker.host_share for _, worker in found]
    assert shares[0] > 8 / 64 > max(shares[1:]) > 0 and sum(shares) < 1
    assert "agg worker 0 of one" in capsys.readouterr().err

    # One more gets what is left, and what runs keeps its places.
    (three,) = placing.place(wanted("three", checkpoint, base, TESSERA_AGG_WORKERS="1"))
    assert (three.slot, list(three.ports), three.workers[0].cards) == (2, [base + 4], ["GPU-0"])
    large = "--multimodal-embedding-cache-capacity-gb=55"
    with pytest.raises(
        SettingError, match=r"(?s)agg worker 0 of one .* GiB: runs already.*agg worker 0 of four"
    ):
        placing.place(wanted("four", checkpoint, base, large, TESSERA_AGG_WORKERS="1"))
    # In its place it fits.
    (four,) = placing.place(
        wanted("four", checkpoint, base, large[:-2] + "50", TESSERA_AGG_WORKERS="1"), leaving=("one",)
    )
    assert list(four.ports) == [base + 4]


def test_the_urls_of_an_ipv6_address_can_be_asked(signals: Signals, checkpoint: Path) -> None:
    """They are printed for people, and asked by what waits until the service is ready."""
    settings = LaunchSettings.read({"TESSERA_HOST": "::1", "TESSERA_PORT": "8123", "TESSERA_FRONTENDS": "1"})
    found = Service(
        settings,
        [WantedModel(settings=settings, split=False)],
        python=sys.executable,
        environment={},
        signals=signals,
        report=Report("text"),
    )
    assert found.urls == ["http://[::1]:8123"]


@pytest.mark.parametrize("script", ["agg", "e_p"])
def test_workers_of_a_small_model_share_each_card(
    script: str, checkpoint: Path, signals: Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(cores=32, nbytes=64 * GIB, cards=CARDS)
    monkeypatch.setattr(service, "this_machine", lambda environment: machine)
    (base,) = free_ports(8)[:1]
    settings = LaunchSettings.read(
        {"TESSERA_MODEL_PATH": str(checkpoint), "TESSERA_SYSTEM_PORT_BASE": str(base)}
    )

    def placed(split: bool, several: bool) -> tuple[list[Deployed], list[tuple[Process, WorkerSettings]]]:
        one = WantedModel(settings=settings, split=split)
        placing = Placing(signals, base, one, several=several)
        models = placing.found()
        return models, placing.workers(models[0])

    models, found = placed(script == "e_p", False)
    cards = [process.environment["CUDA_VISIBLE_DEVICES"] for process, _ in found]
    assert cards == ["GPU-0", "GPU-1", "GPU-0", "GPU-1"]
    assert len({process.environment["DYN_SYSTEM_PORT"] for process, _ in found}) == 4
    assert [worker.card_workers for _, worker in found] == [2, 2, 2, 2]
    if script == "agg":
        # Frontends wait for all of them, and each has its part of the host.
        assert models[0].expected == ("4", "0")
        assert [worker.host_workers for _, worker in found] == [4, 4, 4, 4]
        assert len(placed(False, True)[1]) == 2
