"""The contract with TensorRT-LLM's encoder, kept against a stand-in; the real one needs a GPU of its own."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tessera.engine.batch import VisionBatch
from tessera.engine.factory import make_text_engine, make_vision_engine
from tessera.engine.placement import place
from tessera.engine.settings import EngineSettings
from tessera.errors import ConfigError, EngineFailed, HandOffError
from tessera.models import open_model
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tessera_engines import tensorrt_llm
from tessera_engines.tensorrt_llm import open_handle
from tests.engine.packed_images import of_units, rows_for
from tests.tessera_engines import tensorrt_llm_standin as standin

CONFIG = EngineSettings(
    engine="tensorrt_llm", device="cpu", dtype="float32", max_batch_cost=4, max_queue_cost=4
)


class Known(LlamaNemotronVL):
    """This family as if TensorRT-LLM had it."""

    def tensorrt_llm_input(self, pixels: np.ndarray) -> Mapping[str, Any]:
        return {"prompt": "<image>" * len(pixels), "multi_modal_data": {"image": list(pixels)}}


@pytest.fixture(autouse=True, scope="module")
def shared_memory() -> Iterator[None]:
    """A handle that is refused keeps its maker's memory beyond the maker's end; here that is this process."""
    yield
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    for file in Path("/dev/shm").glob(f"torch_{os.getpid()}_*"):
        # torch ends the process if a file goes before its tensor.
        if file.name not in maps:
            file.unlink(missing_ok=True)


@pytest.fixture
def known(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Known:
    model = Known(checkpoint)
    assert isinstance(model, Known)
    rows, width = model.vision.rows(1), model.vision.row_width

    def compute(inputs: Mapping[str, Any]) -> torch.Tensor:
        images = inputs["multi_modal_data"]["image"]
        return torch.stack([torch.full((rows, width), float(image.max())) for image in images])

    monkeypatch.setattr(standin.MultimodalEncoder, "compute", staticmethod(compute), raising=False)
    module = SimpleNamespace(llmapi=standin)
    monkeypatch.setattr(tensorrt_llm, "load_tensorrt_llm", lambda: module)
    return model


def images(model: Known, counts: list[int]) -> VisionBatch:
    """Images of so many units, each full of its own number of them."""
    batch = of_units(model, counts)
    for image in batch.pixels:
        image[:] = len(image)
    return batch


def test_rows_end_up_where_they_were_asked_for(known: Known) -> None:
    engine = make_vision_engine(known, CONFIG, place(CONFIG))
    engine.warm()
    size = known.vision.rows(1)
    slab = torch.full((5 * size, known.vision.row_width), -1.0)
    batch = images(known, [2, 1])
    launched = engine.launch(batch, [slab[3 * size :], slab[size : 2 * size]])
    launched.result()
    assert launched.done()
    found = slab.view(5, size, -1).amax(dim=(1, 2)).tolist()
    assert found == [-1, 1, -1, 2, 2]
    engine.close()


def test_the_encoder_is_made_with_its_documented_arguments(known: Known) -> None:
    engine = make_vision_engine(known, CONFIG, place(CONFIG))
    encoder = standin.MultimodalEncoder.latest
    assert encoder.arguments == {"model": str(known.path), "dtype": "float32", "max_batch_size": 4}
    engine.close()
    assert not encoder.open


def test_rows_of_another_count_are_refused(known: Known) -> None:
    engine = make_vision_engine(known, CONFIG, place(CONFIG))
    size = known.vision.rows(1)
    out = torch.empty(size + 1, known.vision.row_width)
    launched = engine.launch(images(known, [1]), [out])
    with pytest.raises(EngineFailed, match=f"{size + 1}"):
        launched.result()


def test_an_answer_without_handles_is_refused(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_vision_engine(known, CONFIG, place(CONFIG))
    monkeypatch.setattr(standin, "handle_of", lambda rows: None)
    monkeypatch.setattr(standin.Output, "result", lambda self: self)
    batch = images(known, [1])
    launched = engine.launch(batch, rows_for(known, batch))
    with pytest.raises(EngineFailed, match="without embedding handles"):
        launched.result()


@pytest.mark.starts
def test_a_handle_from_another_process_is_opened_there_and_then() -> None:
    command = [sys.executable, "-m", "tests.tessera_engines.tensorrt_llm_standin"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as producer:
        assert producer.stdout is not None and producer.stdin is not None
        rows = open_handle(json.loads(producer.stdout.readline()))
        expected = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
        assert rows.dtype == torch.bfloat16 and torch.equal(rows, expected)
        producer.stdin.close()
        assert producer.wait(60) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"method_key": 3},
        {"method_key": None},
        {"tensor_size": [40, 6]},
        {"tensor_storage_offset": 1},
        {"tensor_stride": [-6, 1]},
        {"storage_size": 1 << 40, "tensor_size": [1 << 30, 6]},
        {"storage_dtype": "torch.int64"},
        {"storage_handle": "not base64!"},
        {"tensor_size": [24], "tensor_stride": [1]},
    ],
    ids=str,
)
def test_handles_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    rows = torch.zeros(4, 6)
    handle = standin.handle_of(rows)
    with pytest.raises(HandOffError, match="handle"):
        open_handle(handle | change)


def test_a_handle_that_lacks_a_field_is_refused() -> None:
    with pytest.raises(HandOffError, match="storage_dtype"):
        open_handle({"method_key": 2})


def test_a_family_that_tensorrt_llm_does_not_know_is_named(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="llama_nemotron_vl"):
        make_vision_engine(open_model(checkpoint), CONFIG, place(CONFIG))


def test_it_has_no_text_stage(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"tensorrt_llm.*text stage.*torch, aoti, tensorrt"):
        make_text_engine(open_model(checkpoint), CONFIG, place(CONFIG))


@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_llm") is not None, reason="tensorrt_llm is installed here"
)
def test_without_the_package_the_error_says_how_to_get_it(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="pip install tensorrt_llm"):
        make_vision_engine(Known(checkpoint), CONFIG, place(CONFIG))
