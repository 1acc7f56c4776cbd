"""Flags that frontend and workers share; names follow Dynamo's."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from tessera.rpc.runtime import RpcConfig


class HelpFormatter(argparse.HelpFormatter):
    """Ends the help of a flag with its default, where it has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        said = action.help or ""
        if action.default is argparse.SUPPRESS or isinstance(action.default, bool) or "%(default)" in said:
            return said
        return f"{said} (default: %(default)s)" if action.default not in (None, []) else said


def add_rpc_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that every process of a deployment shares."""
    defaults = RpcConfig()
    group = parser.add_argument_group("Dynamo")
    group.add_argument(
        "--namespace", default=defaults.namespace, help="processes of one namespace find each other"
    )
    group.add_argument(
        "--discovery-backend",
        default=defaults.discovery_backend,
        choices=("file", "etcd", "kubernetes", "mem"),
        help="where instances are listed",
    )
    group.add_argument(
        "--request-plane",
        default=defaults.request_plane,
        choices=("tcp", "nats"),
        help="how processes call each other",
    )


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
    return RpcConfig(
        namespace=parsed.namespace,
        discovery_backend=parsed.discovery_backend,
        request_plane=parsed.request_plane,
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-path", type=Path, required=True, help="a checkpoint directory")
    parser.add_argument(
        "--served-model-name", help="the name that requests use; the checkpoint directory's name by default"
    )
