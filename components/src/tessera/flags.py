"""Flags that frontend and workers share; names follow Dynamo's."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from tessera.rpc.runtime import RpcConfig
from tessera.settings import HelpFormatter as HelpFormatter
from tessera.settings import add_flags, read_flags


def add_rpc_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that every process of a deployment shares."""
    add_flags(parser.add_argument_group("Dynamo"), RpcConfig)


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--traces",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="export OpenTelemetry traces, as OTEL_* variables say; on where OTEL_TRACES_EXPORTER is set",
    )


def trace_exporters(
    parsed: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """The exporters that traces go to, by the flag and OpenTelemetry's own variables; none: no traces."""
    if parsed.traces is False or environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ()
    named = environment.get("OTEL_TRACES_EXPORTER", "").split(",")
    names = tuple(dict.fromkeys(name.strip() for name in named if name.strip() not in ("", "none")))
    return names or (("otlp",) if parsed.traces else ())


def rpc_config(parsed: argparse.Namespace) -> RpcConfig:
    return read_flags(RpcConfig, parsed)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-path", type=Path, required=True, help="a checkpoint directory")
    parser.add_argument(
        "--served-model-name", help="the name that requests use; the checkpoint directory's name by default"
    )
