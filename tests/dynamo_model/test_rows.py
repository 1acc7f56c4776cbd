"""An input whose row is no number, as Dynamo's own frontend learns of it: its name, and nothing beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera import wire
from tessera.dynamo_model import DynamoModel
from tessera.engine.factory import make_text_engine
from tessera.engine.placement import place
from tessera.engine.settings import EngineSettings
from tessera.errors import EngineFailed
from tessera.frontend.settings import Limits
from tessera.worker.embed import EmbedService
from tessera.worker.metrics import WorkerMetrics
from tests.families.unsound import NOT_A_NUMBER, TOO_LONG, ZERO, UnsoundEncoder


async def test_the_error_names_the_input() -> None:
    model, settings = UnsoundEncoder(Path(), 3), EngineSettings(max_batch_cost=256, max_queue_cost=4096)
    engine = make_text_engine(model, settings, place(settings))
    info = wire.WorkerInfo(
        role="embed",
        model="m",
        fingerprint=model.fingerprint,
        dtype="float32",
        width=model.output.width,
        row_width=0,
        images=False,
    )
    service = EmbedService(model, engine, settings, None, WorkerMetrics(), info)
    served = DynamoModel(model, ["m"], service.handle, Limits())
    for bad in (f"a {NOT_A_NUMBER}", f"a {TOO_LONG}", ZERO):
        with pytest.raises(EngineFailed, match=r"^input\[1\]: ") as caught:
            await served.answer({"model": "m", "input": ["one", bad]}, "r")
        assert caught.value.param == "input[1]"
    assert len((await served.answer({"model": "m", "input": ["one", "two"]}, "r"))["data"]) == 2
    await service.close()
    engine.close()
