"""Engines in child processes, as a program that has no corpus uses them."""

from __future__ import annotations

import io
import os
import signal

import numpy as np
import pytest
from benchmarks.proc import below
from PIL import Image

from tessera.defaults import MODEL
from tessera.errors import ConfigError, InvalidInput, UnsupportedMedia
from tessera.local.content import Content, ImageFile
from tessera.local.engines import Engines
from tessera.local.options import VectorOptions
from tessera.local.plan import plan_engines
from tessera.models.base import Role
from tests.proc import title

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("local"), pytest.mark.usefixtures("forks")]

LOG = ["--log-level", "warning"]


def picture() -> ImageFile:
    file = io.BytesIO()
    Image.new("RGB", (96, 64), "teal").save(file, "PNG")
    return ImageFile(file.getvalue())


async def test_texts_and_images_go_in_and_rows_come_out_also_after_a_kill() -> None:
    plan = plan_engines(str(MODEL), "", VectorOptions(), log=LOG, most=1)
    engines = await Engines.start(plan)
    try:
        assert engines.count == 1 and engines.model.images and engines.model.checkpoint == "demo"
        contents = [
            Content(parts=("a text",), role=Role.QUERY),
            Content(parts=(ImageFile(b"no image"),)),
            Content(parts=(picture(), "a caption")),
            Content(parts=("word " * 10_000,)),
            Content(parts=(picture(),)),
        ]
        vectors = await engines.embed(contents)
        assert np.diff(vectors.rows.bounds).tolist() == [1, 0, 1, 0, 1]
        assert vectors.rows.values.shape == (3, engines.model.width)
        np.testing.assert_allclose(np.linalg.norm(vectors.rows.values, axis=1), 1, atol=1e-5)
        assert {place: type(error) for place, error in vectors.errors.items()} == {
            1: UnsupportedMedia,
            3: InvalidInput,
        }
        assert vectors.tokens[0] and vectors.tokens[4] > vectors.tokens[0]
        assert (await engines.usage()).images
        (engine,) = [pid for pid in below(os.getpid()) if "local.engine_process" in title(pid)]
        os.kill(engine, signal.SIGKILL)
        again = await engines.embed(contents)
        assert (again.rows.values * vectors.rows.values).sum(axis=1).min() >= 0.9999
    finally:
        await engines.close()


async def test_a_width_that_the_model_does_not_offer_is_refused_by_its_name() -> None:
    plan = plan_engines(str(MODEL), "", VectorOptions(dimensions=7), log=LOG, most=1)
    with pytest.raises(ConfigError, match=r"^dimensions 7: the model offers"):
        await Engines.start(plan)
