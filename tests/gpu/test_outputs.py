"""Scores and vectors of tokens from each engine on the card, beside float32 of transformers from a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tessera.engine.factory import make_text_engine
from tessera.engine.placement import place
from tessera.engine.settings import EngineSettings
from tessera.models import open_model
from tessera.models.base import Model, OutputKind
from tessera_engines.compiled.build import build_engine
from tessera_engines.compiled.spec import BuildSpec, Layout, Profile, Range, Stage
from tests.models.running import batch_of, cosines, error
from tests.references.carry import ALL

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

NAMES = (
    *("llama_nemotron_rerank", "llama_nemotron_rerank_vl", "llama_nemotron_colembed_vl", "colqwen3"),
    *("qwen3_rerank", "qwen3_vl_rerank", "nemotron_3_embed", "nemotron_colembed_vl", "nemotron_3_5_embed"),
)
ENCODERS = ("bert", "xlm_roberta", "bert_rerank", "xlm_roberta_rerank")
KINDS = ("graphs", "plain", "fp8", "aoti")
# Of logits, as shares of their deviation: in bfloat16 0.0369 at most on an H100, 0.0502 from AOTInductor on
# another. Eight bits in tiny layers of random weights, 0.58 at most: this says that the head is behind them,
# no more.
SCORE_BARS = {"aoti": 0.06, "fp8": 0.7}
# Of images through bfloat16 layers of random weights: 0.106 at most on an H100, 0.00002 in float32.
PICTURE_BARS = {"qwen3_vl_rerank": 0.15}
BARS = {"fp8": 0.9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return tmp_path_factory.mktemp("outputs")


def settings(kind: str, model: Model, folder: Path) -> EngineSettings:
    path = None
    if kind == "aoti":
        path = folder / f"{model.family}-engine"
        # The longest input has room.
        most = max(16384, model.max_tokens)
        profile = Profile(sequences=Range(1, 16, 64), tokens=Range(1, 1024, most), rows=Range(1, 256, most))
        spec = BuildSpec(
            stage=Stage.TEXT, flavour="aoti", dtype="bfloat16", layout=Layout.PACKED, profiles=(profile,)
        )
        build_engine(model, spec, path, progress=print)
    if kind == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a CUDA device of capability 8.9 or above")
    return EngineSettings(
        engine="aoti" if path else "torch",
        path=path,
        max_batch_cost=4096,
        max_queue_cost=4096,
        graph_cost=0 if kind == "plain" else None,
        quantization="fp8" if kind == "fp8" else "none",
        unquantized_blocks=0,
    )


# Nothing is compiled of encoders.
CASES = [(name, kind) for name in (*NAMES, *ENCODERS) for kind in KINDS if name in NAMES or kind != "aoti"]
# Eight bits move the seven logits of this one by 1.12 of their deviation, which tells nothing.
CASES.remove(("qwen3_rerank", "fp8"))


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_outputs(name: str, kind: str, folder: Path) -> None:
    carried = ALL[name]
    model = open_model(carried.checkpoint(folder))
    chosen = settings(kind, model, folder)
    engine = make_text_engine(model, chosen, place(chosen))
    engine.warm()
    vision = model.load_vision(dtype="bfloat16", device="cuda") if model.vision else None
    batch = batch_of(model, vision, carried.inputs)
    # Twice, because a replay writes where the one before it did.
    for _ in range(2):
        output = engine.launch(batch).result()
        expected = carried.vectors()
        assert output.values.shape == expected.shape
        if model.output.kind is OutputKind.SCORE:
            difference = error(output.values, expected)
            print(f"{name:32}{kind:8}worst difference {difference:.5f} of a deviation")
            assert difference <= SCORE_BARS.get(kind, PICTURE_BARS.get(name, 0.045))
        else:
            cosine = cosines(output.values, expected).min()
            print(f"{name:32}{kind:8}worst cosine {cosine:.7f} of {len(expected)}")
            assert cosine >= BARS.get(kind, 0.998)
    engine.close()
