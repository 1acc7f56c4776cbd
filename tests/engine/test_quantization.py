"""What an engine config's ``quantization`` comes to, by checkpoint and device, and what follows from it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from tessera.engine.factory import make_text_engine, rounding
from tessera.engine.placement import Placement
from tessera.engine.quantization import resolved, said, saved_bytes, stored_weights
from tessera.engine.settings import EngineSettings
from tessera.errors import ConfigError
from tessera.models import open_model
from tessera.models.base import Model
from tessera.worker.settings import Mode, StageSettings, WorkerSettings
from tessera.worker.sizes import account_of, precise
from tests.checkpoint.modelopt import quantise

CPU = Placement(device="cpu", dtype="float32")
CARD = Placement(device="cuda", dtype="bfloat16")


def config(quantization: str = "auto", engine: str = "torch") -> EngineSettings:
    return EngineSettings(max_batch_cost=8, max_queue_cost=8, quantization=quantization, engine=engine)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Model:
    return open_model(checkpoint)


@pytest.fixture(scope="module")
def eight(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(quantise(checkpoint, tmp_path_factory.mktemp("models") / "eight", static=True))


@pytest.fixture(params=[(8, 0), (8, 9), (9, 0)], ids=str)
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """That of a card which is not here: only what is decided by it is asked."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: request.param)
    return request.param  # type: ignore[no-any-return]


def test_auto_is_what_checkpoint_and_card_can(
    plain: Model, eight: Model, capability: tuple[int, int]
) -> None:
    able = "stored" if capability >= (8, 9) else "none"
    half = msgspec.structs.replace(config(), dtype="float16")
    for model, stage, at, given, expected in (
        (eight, "text", CARD, config(), able),
        (eight, "vision", CARD, config(), "none"),
        (eight, "text", CPU, config(), "none"),
        (eight, "text", Placement(device="cuda", dtype="float16"), half, "none"),
        (eight, "text", CARD, config(engine="aoti"), "none"),
        (plain, "text", CARD, config(), "none"),
        (plain, "text", CARD, config("fp8"), "fp8"),
    ):
        assert resolved(model, stage, given, at).quantization == expected, (stage, at)  # type: ignore[arg-type]


def test_what_cannot_be_is_refused_before_weights_are_loaded(
    plain: Model, eight: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"quantization stored needs a CUDA device of capability 8\.9"):
        make_text_engine(eight, config("stored"), CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with pytest.raises(ConfigError, match=r"quantization stored: .*has no weights of the text stage"):
        make_text_engine(plain, config("stored"), CARD)
    with pytest.raises(ConfigError, match="quantization fp8 needs dtype bfloat16"):
        make_text_engine(plain, config("fp8"), Placement(device="cuda", dtype="float16"))


def test_each_has_a_rounding_of_its_own_and_cannot_be_mistaken_for_another() -> None:
    """Keys of both caches hold it, and frontends tell workers apart by it while one replaces another."""
    found = [rounding(config(name)) for name in ("auto", "none", "stored", "fp8")]
    assert found[:2] == ["", ""] and len(set(found)) == 3


def test_memory_is_that_of_eight_bits(eight: Model, plain: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    weights = stored_weights(eight, "text")
    layers = plain.text.layers  # type: ignore[attr-defined]
    assert len(weights) == 7 * layers and not stored_weights(eight, "vision")
    numbers, rows = sum(one.count for one in weights), sum(one.shape[0] for one in weights)
    assert saved_bytes(eight, "text", config("stored"), CARD) == numbers - 4 * rows
    assert saved_bytes(eight, "text", config("none"), CARD) == 0

    settings = WorkerSettings(
        mode=Mode.EMBED,
        model_path=eight.path,
        stages=StageSettings(vision=config(), text=config()),
        cache_bytes=0,
    )
    on_card = precise(settings, eight, lambda _: CARD)
    account = account_of(on_card, eight, lambda _: CARD)
    uses = {use.what: use.nbytes for use in account.uses}
    assert uses["text weights, some in FP8"] == plain.text_nbytes("bfloat16") - numbers + 4 * rows
    here = account_of(precise(settings, eight, lambda _: CPU), eight, lambda _: CPU)
    assert {use.what: use.nbytes for use in here.uses}["text weights"] == plain.text_nbytes("float32")


def test_the_log_says_which_products_are_in_fp8(eight: Model, plain: Model) -> None:
    count = len(stored_weights(eight, "text"))
    assert said(eight, "text", config("stored"), CARD) == (
        f"text bfloat16, {count} weights in FP8 with the checkpoint's scales"
    )
    assert said(eight, "text", config("none"), CPU) == f"text float32, {count} weights in FP8 multiplied out"
    assert said(eight, "vision", config("none"), CARD) == "vision bfloat16"
    assert said(plain, "text", config("fp8"), CARD).endswith("products in FP8 but for 1 blocks at each end")
