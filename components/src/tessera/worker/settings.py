"""The worker's command line; names follow Dynamo's."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from tessera.config import Mode, WorkerConfig, load_stages
from tessera.errors import ConfigError
from tessera.flags import (
    HelpFormatter,
    add_model_arguments,
    add_rpc_arguments,
    add_trace_arguments,
    rpc_config,
    trace_exporters,
)
from tessera.logs import add_log_arguments


def parse(argv: Sequence[str] | None = None) -> WorkerConfig:
    """Raises ``ConfigError`` for values that argparse cannot judge; exits with status 2 for the rest."""
    parser = argparse.ArgumentParser(
        prog="python -m tessera.worker", description="One Tessera worker.", formatter_class=HelpFormatter
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--disaggregation-mode",
        choices=[mode.value for mode in Mode],
        default=Mode.AGG.value,
        help="which stages it runs: both, vision or text",
    )
    parser.add_argument(
        "--modality",
        choices=("multimodal", "text"),
        default="multimodal",
        help="text makes an embed worker that never asks for vision rows",
    )
    parser.add_argument("--encode-endpoint", help="dyn://namespace.component.endpoint of the encode workers")
    parser.add_argument(
        "--multimodal-embedding-cache-capacity-gb",
        type=float,
        default=1.0,
        help="CPU cache of vision rows, GiB; 0 turns it off",
    )
    parser.add_argument("--extra-engine-args", type=Path, help="YAML file, see engine_configs/")
    parser.add_argument("--override-engine-args", help="JSON object merged over the YAML file")
    parser.add_argument("--max-image-pixels", type=int, default=100_000_000, help="of one image")
    parser.add_argument(
        "--drain-seconds", type=float, default=30.0, help="how long SIGTERM waits for what is in flight"
    )
    parser.add_argument(
        "--encode-wait-seconds",
        type=float,
        default=30.0,
        help="how long after the last encode worker went away images wait for another",
    )
    parser.add_argument(
        "--dynamo-model",
        action="store_true",
        help="serve text and data URLs to an unmodified dynamo.frontend as well; it asks for no API keys",
    )
    add_trace_arguments(parser)
    add_rpc_arguments(parser)
    add_log_arguments(parser)
    parsed = parser.parse_args(argv)
    if not 0 <= parsed.multimodal_embedding_cache_capacity_gb < math.inf:
        raise ConfigError("--multimodal-embedding-cache-capacity-gb must be a number that is not negative")
    if parsed.max_image_pixels < 1 or not 0 <= parsed.drain_seconds < math.inf:
        raise ConfigError("--max-image-pixels must be positive and --drain-seconds not negative")
    if not 0 <= parsed.encode_wait_seconds < math.inf:
        raise ConfigError("--encode-wait-seconds must not be negative")
    if parsed.dynamo_model and parsed.disaggregation_mode == Mode.ENCODE.value:
        raise ConfigError("--dynamo-model is for workers that embed")
    rpc = rpc_config(parsed)
    return WorkerConfig(
        model_path=parsed.model_path,
        served_model_name=parsed.served_model_name or parsed.model_path.resolve().name,
        mode=Mode(parsed.disaggregation_mode),
        rpc=rpc,
        stages=load_stages(parsed.extra_engine_args, parsed.override_engine_args),
        encode_endpoint=parsed.encode_endpoint or f"dyn://{rpc.namespace}.encode.generate",
        images=parsed.modality == "multimodal",
        cache_bytes=int(parsed.multimodal_embedding_cache_capacity_gb * (1 << 30)),
        max_image_pixels=parsed.max_image_pixels,
        drain_seconds=parsed.drain_seconds,
        encode_wait_seconds=parsed.encode_wait_seconds,
        dynamo_model=parsed.dynamo_model,
        traces=trace_exporters(parsed),
    )
