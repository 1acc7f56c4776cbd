"""An engine's answers on any device, held to the float32 vectors that are carried for its model.

A card's tests and those of the CPU are one check, so that a fault in it shows where there is no card.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tessera.engine.batch import pack_images
from tessera.engine.factory import make_text_engine, make_vision_engine
from tessera.engine.placement import place
from tessera.engine.settings import EngineSettings
from tessera.models import open_model
from tessera.models.base import Model, OutputKind
from tessera_engines.compiled.build import build_engine
from tessera_engines.compiled.spec import BuildSpec, Layout, Profile, Range, Stage
from tests.models.carrying import score_bars
from tests.models.running import Given, batch_of, cosines, errors, preprocessed
from tests.references.carry import ALL, Carried

COMPILED = (
    *("llama_nemotron_embed", "qwen3_embedding", "qwen3_vl_embedding"),
    *("llama_nemotron_rerank", "llama_nemotron_rerank_vl", "llama_nemotron_colembed_vl", "colqwen3"),
    *("qwen3_rerank", "qwen3_vl_rerank", "nemotron_3_embed", "nemotron_colembed_vl", "nemotron_3_5_embed"),
)
"""Models whose text stage can be compiled ahead of time."""
ENCODERS = ("bert", "xlm_roberta", "bert_rerank", "xlm_roberta_rerank")
TOWERS = ("clip", "siglip", "siglip_wide_heads", "siglip2")
ELSEWHERE = ("qwen3_vl_embedding_wide_heads", "splade")
"""One differs from another in its vision tower alone; the other's weights are not rows of one width."""

# Of logits, as shares of their deviation: in bfloat16 0.0369 at most on an H100, 0.0502 from AOTInductor on
# another. Eight bits in tiny layers of random weights, 0.58 at most: this says that the head is behind them,
# no more.
SCORE_BARS = {"aoti": 0.06, "fp8": 0.7}
BARS = {"fp8": 0.9}


def text_settings(kind: str, model: Model, folder: Path, device: str) -> EngineSettings:
    """The settings of the text engine of that kind, which ``aoti`` builds below ``folder`` first."""
    path = None
    if kind == "aoti":
        path = folder / f"{model.path.name}-engine"
        build_engine(model, text_spec(model, device), path, progress=print)
    return _settings(kind, 4096, device, path)


def text_spec(model: Model, device: str) -> BuildSpec:
    """An engine that the longest input has room in."""
    most = max(16384, model.max_tokens)
    profile = Profile(sequences=Range(1, 16, 64), tokens=Range(1, 1024, most), rows=Range(1, 256, most))
    return BuildSpec(
        stage=Stage.TEXT,
        flavour="aoti",
        dtype=_dtype(device),
        layout=Layout.PACKED,
        profiles=(profile,),
        decomposable=device == "cpu",
    )


def _settings(kind: str, most: int, device: str, path: Path | None = None) -> EngineSettings:
    return EngineSettings(
        engine="aoti" if path else "torch",
        path=path,
        device=device,
        dtype=_dtype(device),
        max_batch_cost=most,
        max_queue_cost=most,
        graph_cost=0 if kind == "plain" else None,
        quantization="fp8" if kind == "fp8" else "none",
        unquantized_blocks=0,
    )


def _dtype(device: str) -> str:
    return "float32" if device == "cpu" else "bfloat16"


def assert_text(name: str, kind: str, folder: Path, device: str) -> None:
    """Run a model's text engine over its inputs, whose images the vision module encodes."""
    carried = ALL[name]
    model = open_model(carried.checkpoint(folder))
    chosen = text_settings(kind, model, folder, device)
    engine = make_text_engine(model, chosen, place(chosen))
    engine.warm()
    vision = model.load_vision(dtype=chosen.dtype, device=device) if model.vision else None
    batch = batch_of(model, vision, carried.inputs)
    # Twice, because a replay writes where the one before it did.
    for _ in range(2):
        _compare(carried, kind, model.output.kind, engine.launch(batch).result().values, device)
    engine.close()


def assert_towers(name: str, kind: str, folder: Path, device: str) -> None:
    """Run both engines of two towers, each over the inputs that are its own."""
    carried = ALL[name]
    model = open_model(carried.checkpoint(folder))
    alone = [isinstance(given, Given) and not given.images for given in carried.inputs]
    texts, images = np.flatnonzero(alone), np.flatnonzero(np.logical_not(alone))
    found = np.empty_like(carried.vectors())
    chosen = _settings(kind, 4096, device)
    text = make_text_engine(model, chosen, place(chosen))
    text.warm()
    chosen = _settings(kind, 16, device)
    vision = make_vision_engine(model, chosen, place(chosen))
    vision.warm()
    pixels = list(preprocessed(model, carried.inputs).values())
    for _ in range(2):
        batch = batch_of(model, None, [carried.inputs[number] for number in texts])
        found[texts] = text.launch(batch).result().values
        packed = pack_images(pixels, [model.unit_positions(each.plan) for each in pixels])
        out = [place(chosen).rows(1, model.output.width) for _ in pixels]
        if device != "cpu":
            torch.cuda.synchronize()
        vision.launch(packed, out).result()
        found[images] = torch.cat(out).float().cpu().numpy()
        _compare(carried, kind, OutputKind.VECTOR, found, device)
    text.close()
    vision.close()


def _compare(carried: Carried, kind: str, output: OutputKind, found: np.ndarray, device: str) -> None:
    name, expected = carried.name, carried.vectors()
    assert found.shape == expected.shape
    if output is OutputKind.SCORE:
        each = errors(found, expected)
        print(f"{name:32}{kind:8}worst difference {each.max():.5f} of a deviation")
        bar = 0.001 if device == "cpu" else SCORE_BARS.get(kind, 0.045)
        assert (each <= score_bars(carried, bar)).all()
    else:
        cosine = cosines(found, expected).min()
        print(f"{name:32}{kind:8}worst cosine {cosine:.7f} of {len(expected)}")
        assert cosine >= (0.99999 if device == "cpu" else BARS.get(kind, 0.998))
