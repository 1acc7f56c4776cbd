"""Which processes a host gets, on which cards, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tessera.frontend.settings import parse as parse_frontend
from tessera.launch.processes import Workers, agg_workers, e_p_workers
from tessera.launch.settings import LaunchSettings
from tessera.launch.split import described, most_on_a_card, on_cards, settled, sharing, with_frontends
from tessera.machine import Card, Machine
from tessera.worker.settings import parse
from tests.launch.started import processes

GIB = 1 << 30


def host(cards: int, *, cores: int = 16, gib: int = 128) -> Machine:
    found = tuple(Card(entry=str(at), name="H200", nbytes=140 * GIB) for at in range(cards))
    return Machine(cores=cores, nbytes=gib * GIB, cards=found)


def started(
    script: str, machine: Machine, *, text_only: bool = False, **given: str
) -> tuple[LaunchSettings, list[Workers], list[list[int]]]:
    settings = settled(LaunchSettings.read(given), machine)
    make = {"agg": agg_workers, "e_p": e_p_workers}[script]
    kinds = make(settings, ())
    if text_only:
        kinds = [kind for kind in kinds if kind.role != "encode"]
    settings = with_frontends(settings, kinds, machine)
    kinds = on_cards(kinds, machine)
    return settings, kinds, sharing(kinds, machine)


def line(script: str, machine: Machine, *, text_only: bool = False, **given: str) -> str:
    settings, kinds, _ = started(script, machine, text_only=text_only, **given)
    return described(settings, kinds, machine)


def cards(script: str, machine: Machine, *, text_only: bool = False, **given: str) -> dict[str, list[str]]:
    _, kinds, _ = started(script, machine, text_only=text_only, **given)
    return {kind.role: kind.cards for kind in kinds}


@pytest.mark.parametrize(
    ("count", "agg", "both"),
    [
        # As it always was: a worker finds the one card, or that there is none.
        (0, [""], [""]),
        (1, [""], [""]),
        (2, ["0", "1"], ["0", "1"]),
        (8, [str(at) for at in range(8)], [str(at) for at in range(8)]),
    ],
)
def test_every_card_gets_one_worker_of_each_mode(count: int, agg: list[str], both: list[str]) -> None:
    assert cards("agg", host(count)) == {"agg": agg}
    assert cards("e_p", host(count)) == {"encode": both, "embed": both}


def test_a_card_is_shared_where_nothing_says_how_many_workers_there_are() -> None:
    def most(machine: Machine, *, parameters: int = 430_000_000, **given: str) -> int:
        return most_on_a_card(LaunchSettings.read(given), machine, parameters=parameters)

    assert [most(host(1)), most(host(2)), most(host(2, cores=64))] == [2, 1, 4]
    assert [most(host(0)), most(host(1), parameters=880_000_000)] == [1, 1]
    small = Card(entry="1", name="RTX 3050", nbytes=4 * GIB)
    both = replace(host(1, cores=64), cards=(*host(1).cards, small))
    assert [most(both), most(replace(both, cards=(replace(small, nbytes=0),)))] == [1, 1]
    assert most(host(1), TESSERA_AGG_WORKERS="1") == 1
    assert most(host(1), TESSERA_AGG_CUDA_VISIBLE_DEVICES="0") == 1


def test_a_model_of_text_alone_has_all_cards_for_its_texts() -> None:
    assert cards("e_p", host(2), text_only=True) == {"embed": ["0", "1"]}


def test_numbers_that_are_given_stay_and_take_the_cards_in_turn() -> None:
    assert cards("e_p", host(2), TESSERA_ENCODE_WORKERS="1", TESSERA_EMBED_WORKERS="1") == {
        "encode": ["0"],
        "embed": ["1"],
    }
    assert cards("e_p", host(4), TESSERA_ENCODE_WORKERS="1") == {
        "encode": ["0"],
        "embed": ["1", "2", "3", "0"],
    }
    assert cards("e_p", host(4), TESSERA_ENCODE_WORKERS="0", TESSERA_EMBED_WORKERS="2") == {
        "encode": [],
        "embed": ["0", "1"],
    }
    assert cards("agg", host(2), TESSERA_AGG_WORKERS="3") == {"agg": ["0", "1", "0"]}
    assert cards("agg", host(0), TESSERA_AGG_WORKERS="3") == {"agg": ["", "", ""]}


def test_lists_that_are_given_win() -> None:
    lists = {"TESSERA_ENCODE_CUDA_VISIBLE_DEVICES": "6", "TESSERA_EMBED_CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,"}
    assert cards("e_p", host(8), **lists) == {"encode": ["6"], "embed": ["GPU-a", "GPU-b"]}
    assert cards("e_p", host(8), TESSERA_ENCODE_WORKERS="2", **lists)["encode"] == ["6", "6"]
    assert cards("agg", host(2), TESSERA_AGG_CUDA_VISIBLE_DEVICES="1") == {"agg": ["1"]}


@pytest.mark.parametrize(
    ("script", "machine", "given", "shares"),
    [
        ("agg", host(0), {}, [[1]]),
        ("agg", host(0), {"TESSERA_AGG_WORKERS": "2"}, [[1, 1]]),
        ("agg", host(1), {"TESSERA_AGG_WORKERS": "2"}, [[2, 2]]),
        ("agg", host(2), {}, [[1, 1]]),
        ("e_p", host(1), {}, [[2], [2]]),
        ("e_p", host(2), {}, [[2, 2], [2, 2]]),
        ("e_p", host(2), {"TESSERA_ENCODE_WORKERS": "1", "TESSERA_EMBED_WORKERS": "1"}, [[1], [1]]),
        ("e_p", host(2), {"TESSERA_ENCODE_WORKERS": "1"}, [[2], [1, 2]]),
        ("e_p", host(2), {"TESSERA_EMBED_CUDA_VISIBLE_DEVICES": "0"}, [[1, 2], [2]]),
    ],
)
def test_workers_are_told_who_is_on_their_card(
    script: str, machine: Machine, given: dict[str, str], shares: list[list[int]]
) -> None:
    assert started(script, machine, **given)[2] == shares


def test_workers_understand_what_they_are_told(tmp_path: Path) -> None:
    machine, model = host(2), str(tmp_path)
    settings, kinds, shares = started(
        "e_p", machine, TESSERA_MODEL_PATH=model, TESSERA_ENGINE_ARGS="", TESSERA_FRONTENDS="0"
    )
    (tmp_path / "none.yaml").touch()
    for process in processes(settings, kinds, {}, shares):
        arguments = list(process.arguments[2:])
        arguments[arguments.index("--extra-engine-args") + 1] = str(tmp_path / "none.yaml")
        worker = parse(arguments)
        assert (worker.host_workers, worker.card_workers, worker.mode) == (2, 2, process.role)


@pytest.mark.parametrize(
    ("script", "machine", "given", "said"),
    [
        ("agg", host(0, cores=1, gib=4), {}, "1 core, 4 GiB: 1 frontend, 1 agg worker"),
        (
            "agg",
            host(1),
            {"TESSERA_FRONTENDS": "6"},
            "1 H200 of 140 GiB, 16 cores, 128 GiB: 6 frontends, 1 agg worker",
        ),
        (
            *("agg", host(2, cores=32, gib=256), {}),
            "2 H200 of 140 GiB, 32 cores, 256 GiB: 12 frontends, 2 agg workers, 1 agg on each GPU",
        ),
        (
            *("e_p", host(1), {}),
            "1 H200 of 140 GiB, 16 cores, 128 GiB: 6 frontends, 1 encode worker, 1 embed worker, on one GPU",
        ),
        (
            *("e_p", host(2), {}),
            "2 H200 of 140 GiB, 16 cores, 128 GiB: 6 frontends, 2 encode workers, 2 embed workers, "
            "1 encode and 1 embed on each GPU",
        ),
        (
            *("e_p", host(2), {"TESSERA_ENCODE_WORKERS": "1", "TESSERA_EMBED_WORKERS": "1"}),
            "2 H200 of 140 GiB, 16 cores, 128 GiB: 6 frontends, 1 encode worker, 1 embed worker; "
            "GPU 0: 1 encode; GPU 1: 1 embed",
        ),
        (
            *(
                "e_p",
                host(0),
                {"TESSERA_ENCODE_WORKERS": "0", "TESSERA_EMBED_WORKERS": "0", "TESSERA_FRONTENDS": "2"},
            ),
            "16 cores, 128 GiB: 2 frontends, no worker",
        ),
    ],
)
def test_one_line_says_what_is_there_and_what_is_started(
    script: str, machine: Machine, given: dict[str, str], said: str
) -> None:
    assert line(script, machine, **given) == f"this host: {said}"


def test_cards_of_several_kinds_are_counted_apart() -> None:
    mixed = Machine(
        cores=8,
        nbytes=64 * GIB,
        cards=(Card(entry="0", name="GB10"), Card(entry="MIG-1", name="MIG 3g.20gb", nbytes=20 * GIB)),
    )
    said = line("agg", mixed, TESSERA_AGG_WORKERS="1")
    assert said == "this host: 1 GB10, 1 MIG 3g.20gb of 20 GiB, 8 cores, 64 GiB: 3 frontends, 1 agg worker"


def test_a_number_of_frontends_that_is_given_stays() -> None:
    assert started("agg", host(8), TESSERA_FRONTENDS="1")[0].frontends == 1
    assert started("agg", host(8), TESSERA_FRONTENDS="0")[0].frontends == 0


def test_frontends_bound_their_requests_together_and_arguments_win(tmp_path: Path) -> None:
    def limit(**given: str) -> int:
        settings, kinds, shares = started("agg", host(1), TESSERA_MODEL_PATH=str(tmp_path), **given)
        frontend = processes(settings, kinds, {}, shares)[0]
        return parse_frontend(frontend.arguments[2:]).limits.max_in_flight

    assert (limit(), limit(TESSERA_FRONTENDS="1")) == (6144, 1024)
    assert limit(TESSERA_FRONTEND_ARGS="--max-in-flight 7") == 7


def several(machine: Machine, *given: dict[str, str]) -> list[Workers]:
    """The workers of models, each with both stages, that are placed at once."""
    kinds = []
    for number, own in enumerate(given):
        (kind,) = agg_workers(settled(LaunchSettings.read(own), machine), ())
        kinds.append(replace(kind, model=f"m{number}"))
    return on_cards(kinds, machine)


def test_models_spread_over_the_cards() -> None:
    assert [kind.cards for kind in several(host(2), {}, {})] == [["0", "1"], ["0", "1"]]
    one = {"TESSERA_AGG_WORKERS": "1"}
    assert [kind.cards for kind in several(host(4), one, one, one)] == [["0"], ["1"], ["2"]]
    # What is tied to a card is not joined while others are free.
    tied = one | {"TESSERA_AGG_CUDA_VISIBLE_DEVICES": "0"}
    assert [kind.cards for kind in several(host(2), one, tied)] == [["1"], ["0"]]
    later = on_cards([replace(several(host(2), one)[0], gpus="")], host(2), several(host(2), one))
    assert later[0].cards == ["1"]
    assert [kind.cards for kind in several(host(1), one, one)] == [[""], [""]]


def test_workers_of_models_are_named_and_counted_together() -> None:
    kinds = several(host(2), {}, {"TESSERA_AGG_WORKERS": "1"})
    assert [kind.name(0) for kind in kinds] == ["agg worker 0 of m0", "agg worker 0 of m1"]
    assert sharing(kinds, host(2)) == [[2, 1], [2]]
    said = described(LaunchSettings(frontends=1), kinds, host(2))
    assert said.endswith("1 frontend, 3 agg workers; GPU 0: 1 agg of m0 and 1 agg of m1; GPU 1: 1 agg of m0")
