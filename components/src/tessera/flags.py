"""Flags that frontend and workers share; names follow Dynamo's."""

from __future__ import annotations

import argparse
from pathlib import Path

from tessera.rpc.runtime import RpcConfig


def add_rpc_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that every process of a deployment shares."""
    defaults = RpcConfig()
    group = parser.add_argument_group("Dynamo")
    group.add_argument("--namespace", default=defaults.namespace)
    group.add_argument(
        "--discovery-backend",
        default=defaults.discovery_backend,
        choices=("file", "etcd", "kubernetes", "mem"),
        help="where instances are listed",
    )
    group.add_argument("--request-plane", default=defaults.request_plane, choices=("tcp", "nats"))


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
