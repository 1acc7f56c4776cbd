"""The sizes that a worker chooses, of models at full size, of which no weights are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tessera.defaults import GIB, Share
from tessera.engine.placement import Placement
from tessera.engine.settings import EngineSettings
from tessera.models import Model
from tessera.worker.settings import Mode, WorkerSettings, load_stages
from tessera.worker.sizes import Room, account_of, said, sized


def on_card(settings: EngineSettings) -> Placement:
    return Placement(device="cuda", dtype="bfloat16")


def on_cpu(settings: EngineSettings) -> Placement:
    return Placement(device="cpu", dtype="float32")


def given(mode: Mode, *, beside: int = 1, shared: int = 1, **stages: object) -> WorkerSettings:
    return WorkerSettings(
        model_path=Path("model"),
        mode=mode,
        host_workers=beside,
        card_workers=shared,
        stages=load_stages(None, stages),
    )


def room(worker: WorkerSettings, *, cores: int, gib: int, card: int = 0, free: float = 1.0) -> Room:
    """``card`` is a card's memory in GiB, 0 for none; ``free`` what is free of both memories."""
    sizes = {"cpu": gib * GIB, "cuda": card * GIB}
    return Room(
        share=Share(cores=cores, nbytes=gib * GIB, beside=worker.host_workers, on_card=card > 0),
        place=on_card if card else on_cpu,
        free=lambda device: int(sizes[device] * free),
        most=sizes.__getitem__,
    )


def chosen(worker: WorkerSettings, model: Model) -> tuple[int, ...]:
    stages = worker.stages
    found = (stages.vision.max_batch_cost, stages.vision.max_queue_cost, stages.preprocess_threads)
    text = (stages.text.max_batch_cost, stages.text.max_queue_cost)
    return {Mode.AGG: found + text, Mode.ENCODE: found, Mode.EMBED: text}[worker.mode]


NEMOTRON, QWEN = (28, 1792, 6), (28_800, 1_843_200, 6)
TEXT = (16_384, 524_288)


@pytest.mark.parametrize(
    ("family", "vision", "slab", "staging"),
    [("llama_nemotron_vl", NEMOTRON, 256, 64), ("qwen3_vl_embedding", QWEN, 512, 256)],
)
@pytest.mark.parametrize(("cards", "shared"), [(1, 1), (2, 2), (8, 2)])
def test_what_was_measured_as_best_on_large_cards(
    models: dict[str, Model],
    family: str,
    vision: tuple[int, ...],
    slab: int,
    staging: int,
    cards: int,
    shared: int,
) -> None:
    machine = {"cores": 16 * cards, "gib": 128 * cards, "card": 139}
    model = models[family]
    agg = sized(worker := given(Mode.AGG, beside=cards), model, room(worker, **machine))
    assert (chosen(agg, model), agg.cache_bytes) == (vision + TEXT, 8 * GIB)
    encode = sized(worker := given(Mode.ENCODE, beside=cards, shared=shared), model, room(worker, **machine))
    assert (chosen(encode, model), encode.stages.transport.slab_mb) == (vision, slab)
    embed = sized(worker := given(Mode.EMBED, beside=cards, shared=shared), model, room(worker, **machine))
    assert (chosen(embed, model), embed.stages.transport.staging_mb) == (TEXT, staging)
    assert embed.cache_bytes == 8 * GIB


def test_two_cores_decode_as_they_always_did(models: dict[str, Model]) -> None:
    model, worker = models["llama_nemotron_vl"], given(Mode.AGG)
    found = sized(worker, model, room(worker, cores=2, gib=23))
    assert chosen(found, model) == (28, 1792, 2, *TEXT)
    assert GIB <= (found.cache_bytes or 0) <= 2 * GIB


@pytest.mark.parametrize("family", ["clip", "siglip2"])
def test_towers_of_few_parameters_have_more_decoders(models: dict[str, Model], family: str) -> None:
    """An image of theirs passes no language model, however large that is."""
    worker = given(Mode.AGG)
    found = sized(worker, models[family], room(worker, cores=16, gib=128, card=80))
    assert found.stages.preprocess_threads == 10


def test_a_model_of_text_alone_has_no_cache(models: dict[str, Model]) -> None:
    worker = given(Mode.AGG)
    found = sized(worker, models["qwen3_embedding"], room(worker, cores=16, gib=128, card=139))
    assert (found.cache_bytes, found.stages.vision.max_batch_cost) == (0, 0)
    assert found.stages.text.max_batch_cost == 16_384


def test_vectors_of_images_are_kept_where_they_are_made(models: dict[str, Model]) -> None:
    """In a family of two towers an encode worker answers with them, and an embed worker has texts."""
    model, found = models["clip"], {}
    for mode in Mode:
        worker = given(mode)
        found[mode] = sized(worker, model, room(worker, cores=16, gib=128, card=139))
        assert (
            "cache of vision rows" in said(found[mode], worker, model, room(worker, cores=16, gib=128).share)
        ) == (mode is not Mode.EMBED)
    assert {mode: each.cache_bytes for mode, each in found.items()} == {
        Mode.AGG: 8 * GIB,
        Mode.ENCODE: 8 * GIB,
        Mode.EMBED: 0,
    }


@pytest.mark.parametrize("family", ["llama_nemotron_vl", "qwen3_vl_embedding"])
def test_small_cards_get_small_batches(models: dict[str, Model], family: str) -> None:
    model, before = models[family], (0, 0)
    for card in (6, 8, 12, 16, 24, 48):
        worker = given(Mode.AGG)
        where = room(worker, cores=8, gib=32, card=card)
        found = sized(worker, model, where)
        now = (found.stages.vision.max_batch_cost, found.stages.text.max_batch_cost)
        assert before <= now
        if card >= 8:
            assert account_of(found, model, on_card).needed("cuda") < card * GIB
        before = now
    assert before[0] in (28, 28_800) and before[1] == 16_384


def test_workers_that_share_a_card_do_not_each_take_all_of_it(models: dict[str, Model]) -> None:
    model = models["llama_nemotron_vl"]
    for shared in (1, 2, 4):
        worker = given(Mode.AGG, beside=shared, shared=shared)
        found = sized(worker, model, room(worker, cores=16, gib=64, card=24))
        assert shared * account_of(found, model, on_card).needed("cuda") < 24 * GIB


def test_what_is_free_counts_and_not_what_is_there(models: dict[str, Model]) -> None:
    model, worker = models["llama_nemotron_vl"], given(Mode.AGG)
    whole = sized(worker, model, room(worker, cores=16, gib=128, card=16))
    rest = sized(worker, model, room(worker, cores=16, gib=128, card=16, free=0.4))
    assert rest.stages.text.max_batch_cost < whole.stages.text.max_batch_cost


def test_a_small_host_gets_a_small_cache_and_not_a_refusal(models: dict[str, Model]) -> None:
    model, worker = models["llama_nemotron_vl"], given(Mode.AGG)
    found = sized(worker, model, room(worker, cores=2, gib=9))
    assert account_of(found, model, on_cpu).needed("cpu") < 9 * GIB
    assert found.cache_bytes is not None and 0 < found.cache_bytes < GIB


def test_what_is_given_stays_whatever_there_is(models: dict[str, Model]) -> None:
    model = models["llama_nemotron_vl"]
    numbers: dict[str, Any] = {
        "vision": {"max_batch_cost": 56, "max_queue_cost": 60},
        "text": {"max_batch_cost": 100_000, "max_queue_cost": 100_000},
        "preprocess_threads": 31,
        "transport": {"slab_mb": 7, "staging_mb": 9},
    }
    for mode in Mode:
        worker = given(mode, **numbers)
        worker = msgspec.structs.replace(worker, cache_bytes=77 * GIB)
        found = sized(worker, model, room(worker, cores=2, gib=4, card=4))
        assert found == worker


def test_a_size_that_is_left_open_fits_one_that_is_given(models: dict[str, Model]) -> None:
    model = models["llama_nemotron_vl"]
    worker = given(Mode.AGG, vision={"max_queue_cost": 8}, text={"max_batch_cost": 600_000})
    found = sized(worker, model, room(worker, cores=16, gib=128, card=139)).stages
    assert (found.vision.max_batch_cost, found.vision.max_queue_cost) == (8, 8)
    assert (found.text.max_batch_cost, found.text.max_queue_cost) == (600_000, 600_000)


def test_one_line_says_what_was_chosen_and_what_was_given(models: dict[str, Model]) -> None:
    model, worker = models["llama_nemotron_vl"], given(Mode.AGG, preprocess_threads=3, threads=1)
    where = room(worker, cores=16, gib=128, card=139)
    line = said(sized(worker, model, where), worker, model, where.share)
    assert line.startswith("16 cores and 128.0 GiB: ")
    for part in (
        "3 image decoders (given)",
        "vision 28 units a batch and 1,792 waiting",
        "text 16,384 tokens a batch and 524,288 waiting",
        "cache of vision rows 8.0 GiB",
    ):
        assert part in line, line
