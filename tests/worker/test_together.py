"""Workers of several models on one host: whether they fit, and what each is told of its share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tessera.defaults import GIB, Share
from tessera.errors import ConfigError
from tessera.models import Model, open_model
from tessera.worker.settings import Mode, WorkerSettings
from tessera.worker.sizes import Room, account_of, sized
from tessera.worker.together import Asked, Fit, Host, Takes, fit
from tests.worker.test_sizes import given, on_card, on_cpu

MODES = {mode.value: mode for mode in Mode}


@pytest.fixture(scope="session")
def more(models: dict[str, Model], checkpoint: Path) -> dict[str, Model]:
    return models | {"small": open_model(checkpoint)}


class OneHost:
    """A host with cards of so many GiB, ``free`` of its own memory; workers are ``model/mode@card``."""

    def __init__(self, models: dict[str, Model], *, gib: int, cards: dict[str, int], free: int = 0) -> None:
        self.models, self.gib, self.cards, self.free = models, gib, cards, free or gib

    def settings(self, asked: Asked) -> WorkerSettings:
        model, _, mode = asked.name.partition("/")
        own = given(MODES[mode.partition("@")[0]])
        return msgspec.structs.replace(own, model_path=Path(model))

    def model(self, settings: WorkerSettings) -> Model:
        return self.models[str(settings.model_path)]

    def room(self, settings: WorkerSettings) -> Room:
        sizes = {"cpu": self.gib * GIB, "cuda": max([0, *self.cards.values()]) * GIB}
        return Room(
            share=Share(cores=16, nbytes=self.gib * GIB, on_card=bool(self.cards)),
            place=on_card if self.cards else on_cpu,
            free=sizes.__getitem__,
            most=sizes.__getitem__,
        )

    def fit(self, *workers: str, running: dict[str, Takes] | None = None) -> Fit:
        running = running or {}
        asked = [
            Asked(name=name, arguments=[], card=name.partition("@")[2], takes=running.get(name))
            for name in workers
        ]
        host = Host(
            workers=asked,
            nbytes=self.gib * GIB,
            free=self.free * GIB,
            cards={card: gib * GIB for card, gib in self.cards.items()},
        )
        return fit(host, parsed=self.settings, opened=self.model, room=self.room)

    def chosen(self, name: str, found: Fit, index: int) -> Takes:
        """What the worker chooses once it is told its shares."""
        settings = self.settings(Asked(name=name, arguments=[]))
        told = found.workers[index]
        settings = msgspec.structs.replace(
            settings, host_share=told.host_share, card_share=told.card_share, card_workers=9, host_workers=9
        )
        room = self.room(settings)
        model = self.model(settings)
        account = account_of(sized(settings, model, room), model, room.place)
        return Takes(host=account.needed("cpu"), card=account.needed("cuda"))


def test_where_all_fits_each_gets_what_its_largest_sizes_take(more: dict[str, Model]) -> None:
    host = OneHost(more, gib=256, cards={"0": 141})
    workers = ["llama_nemotron_vl/agg@0", "qwen3_embedding/agg@0"]
    found = host.fit(*workers)
    alone = [host.fit(worker).workers[0].takes for worker in workers]
    assert [each.takes for each in found.workers] == alone
    assert found.workers[0].card_share > 2 * found.workers[1].card_share > 0
    assert [host.chosen(worker, found, at) for at, worker in enumerate(workers)] == alone
    assert "llama_nemotron_vl/agg@0" in found.table and "vision weights" in found.table
    assert found.table.count("fits") == 2


def test_where_little_is_left_shares_are_by_need_and_never_too_much(more: dict[str, Model]) -> None:
    workers = ["llama_nemotron_vl/agg@0", "qwen3_embedding/agg@0"]
    largest = sum(each.takes.card for each in OneHost(more, gib=256, cards={"0": 141}).fit(*workers).workers)
    host = OneHost(more, gib=256, cards={"0": int(largest / 0.9 / GIB)})
    found = host.fit(*workers)
    takes = [each.takes for each in found.workers]
    assert sum(each.card for each in takes) <= host.cards["0"] * GIB * 0.9 < largest
    assert [host.chosen(worker, found, at) for at, worker in enumerate(workers)] == takes


def test_too_much_for_a_card_is_refused_with_a_table_of_who_takes_what(more: dict[str, Model]) -> None:
    host = OneHost(more, gib=256, cards={"0": 9, "1": 141})
    refused = r"(?s)do not fit into memory.*GPU 0, of 8\.10 GiB:.*text weights.*in all .* does not fit"
    with pytest.raises(ConfigError, match=refused):
        host.fit("llama_nemotron_vl/agg@0", "qwen3_vl_embedding/agg@0")
    # One on each is no trouble.
    assert host.fit("qwen3_embedding/agg@0", "qwen3_vl_embedding/agg@1").table.count("fits") == 3


def test_what_runs_already_is_counted_as_it_was(more: dict[str, Model]) -> None:
    host = OneHost(more, gib=64, cards={"0": 40})
    first = "llama_nemotron_vl/agg@0"
    running = {first: host.fit(first).workers[0].takes}
    assert host.fit(first, "qwen3_embedding/agg@0", running=running).workers[0].takes == running[first]
    running[first] = Takes(host=1, card=36 * GIB)
    with pytest.raises(ConfigError, match=r"36\.00 GiB: runs already"):
        host.fit(first, "qwen3_embedding/agg@0", running=running)


def test_on_processors_it_is_the_hosts_memory_and_what_is_free_of_it(more: dict[str, Model]) -> None:
    workers = ["qwen3_embedding/agg", "small/agg"]
    found = OneHost(more, gib=64, cards={}).fit(*workers)
    assert found.workers[0].host_share > found.workers[1].host_share > 0
    assert {each.card_share for each in found.workers} == {0.0}
    with pytest.raises(
        ConfigError, match=r"(?s)this host, of 1\.00 GiB:.*qwen3_embedding/agg .*text weights"
    ):
        OneHost(more, gib=64, cards={}, free=1).fit(*workers)


@pytest.mark.starts
def test_the_process_answers_in_json(checkpoint: Path, tmp_path: Path) -> None:
    flags = ["--model-path", str(checkpoint), "--disaggregation-mode", "agg"]
    host = Host(workers=[Asked(name="agg worker 0", arguments=flags)], nbytes=64 * GIB, free=64 * GIB)
    (tmp_path / "host").write_bytes(msgspec.json.encode(host))
    command = [sys.executable, "-m", "tessera.worker.together", str(tmp_path / "host")]
    done = subprocess.run(command, capture_output=True, check=True)
    assert msgspec.json.decode(done.stdout, type=Fit).workers[0].takes.host > GIB // 2
