"""This family's forward pass, stage by stage, for TensorRT."""

from __future__ import annotations

from typing import cast

from tessera.errors import ConfigError
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tessera.models.llama_nemotron_vl.vision import LlamaNemotronVision
from tessera.nn.loading import load_text
from tessera_engines.networks.graph import Graph, NetworkRequest
from tessera_engines.networks.llama_nemotron_vl.arithmetic import Arithmetic
from tessera_engines.networks.llama_nemotron_vl.calibration import text_scales, vision_scales
from tessera_engines.networks.llama_nemotron_vl.layout import Packed, Padded
from tessera_engines.networks.llama_nemotron_vl.text import TextNetwork
from tessera_engines.networks.llama_nemotron_vl.vision import VisionNetwork


def describe_network(model: LlamaNemotronVL, graph: Graph, request: NetworkRequest) -> None:
    """Read what the stage needs and describe it; implements ``Describe``."""
    config = model.config
    stages = {"vision", "text", "fused", "embed", "lm", "post"}
    if request.stage not in stages:
        raise ConfigError(f"{model.family} has no stage {request.stage!r}, only {sorted(stages)}")
    products = "bfloat16" if request.dtype == "float8" else request.dtype
    vision = text = None
    if request.stage in ("vision", "fused"):
        tower = cast(LlamaNemotronVision, model.load_vision(dtype=products, device="cpu"))
        scales = vision_scales(tower, request.samples) if request.dtype == "float8" else {}
        vision = VisionNetwork(Arithmetic(graph, products, scales), config, tower)
    if request.stage == "vision":
        assert vision is not None
        graph.output("rows", vision.rows(vision.tiles()))
        return
    spec = model.text
    besides = spec.steps or spec.besides or spec.cut is not None
    if besides or spec.pooling not in ("mean", "last", "first") or spec.layer != config.text.layer:
        raise ConfigError(
            f"{model.path}: declares modules or attention that TensorRT's network does not have"
        )
    backbone = load_text(spec, model.tensors(), part="text.", dtype=products, device="cpu")
    scales = {}
    if request.dtype == "float8" and request.stage not in ("embed", "post"):
        scales = text_scales(backbone, request.samples)
    layout = (Packed if request.packed else Padded)(graph)
    text = TextNetwork(Arithmetic(graph, products, scales), backbone, layout)
    if request.stage == "post":
        hidden = layout.hidden("hidden", products, config.text.layer.hidden)
        text.finish(hidden)
        return
    if request.stage == "lm":
        hidden = layout.hidden("embedded", products, config.text.layer.hidden)
        graph.output("hidden", text.encoded(hidden, request.max_length))
        return
    rows = None
    if vision is not None:
        rows = graph.reshape(vision.rows(vision.tiles()), (-1, config.text.layer.hidden))
    with graph.within("text.embed"):
        embedded = text.embedded(rows)
    if request.stage == "embed":
        graph.output("embedded", embedded)
        return
    text.finish(text.encoded(embedded, request.max_length))
