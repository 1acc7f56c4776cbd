"""What a network was made of, and what the compiler made of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tessera.errors import ConfigError
from tessera_engines.tensorrt.module import load_tensorrt, logging_of, to_name


def network_information(trt: Any, network: Any, attentions: list[Any]) -> dict[str, Any]:
    """Every layer as it was described, their number by kind, and what was asked of each attention.

    An attention that may not be decomposed runs as one fused kernel, or its engine could not be built.
    """
    layers = [network.get_layer(number) for number in range(network.num_layers)]
    return {
        "kinds": dict(Counter(layer.type.name.lower() for layer in layers).most_common()),
        "attention": [
            {
                "name": layer.name,
                "dtype": to_name(trt, layer.get_output(0).dtype),
                "form": layer.query_form.name.lower(),
                "masked": layer.mask is not None,
                "fused": "not known before it is loaded" if layer.decomposable else "always",
            }
            for layer in attentions
        ],
        "layers": [
            {
                "name": layer.name,
                "dtype": to_name(trt, layer.get_output(0).dtype),
                "shape": list(layer.get_output(0).shape),
            }
            for layer in layers
            if layer.type != trt.LayerType.ATTENTION_INPUT
        ],
    }


def engine_information(flavour: str, plan: Path) -> dict[str, Any]:
    """Tensors, profiles and layers from TensorRT's own inspector; or why it could not be asked."""
    found: dict[str, Any] = {"plan_nbytes": plan.stat().st_size}
    try:
        trt = load_tensorrt(flavour)
    except ConfigError as error:
        return found | {"not_loaded": str(error)}
    if not torch.cuda.is_available():
        return found | {"not_loaded": f"{flavour} loads engines only where there is a GPU that it supports"}
    logger, messages = logging_of(trt)
    messages.clear()
    runtime = trt.Runtime(logger)
    engine = runtime.deserialize_cuda_engine(plan.read_bytes())
    if engine is None:
        return found | {"not_loaded": str(messages)}
    inspector = engine.create_engine_inspector()
    names = [engine.get_tensor_name(number) for number in range(engine.num_io_tensors)]
    return found | {
        "tensors": {
            name: {
                "mode": engine.get_tensor_mode(name).name.lower(),
                "dtype": to_name(trt, engine.get_tensor_dtype(name)),
                "shape": list(engine.get_tensor_shape(name)),
                "profiles": [
                    [list(shape) for shape in engine.get_tensor_profile_shape(name, profile)]
                    for profile in range(engine.num_optimization_profiles)
                    if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
                ],
            }
            for name in names
        },
        "device_memory_nbytes": [
            engine.get_device_memory_size_for_profile_v2(profile)
            for profile in range(engine.num_optimization_profiles)
        ],
        "layers": json.loads(inspector.get_engine_information(trt.LayerInformationFormat.JSON)),
    }
