"""The one place that knows Dynamo: serving an endpoint, calling an instance, watching discovery."""

from tessera.rpc.client import Client, Loads
from tessera.rpc.discovery import FORGOTTEN, until_back
from tessera.rpc.model_server import ModelServer
from tessera.rpc.peers import DRAIN_PATIENCE_SECONDS, Check, Peers
from tessera.rpc.runtime import RpcSettings, Runtime, set_environment_defaults
from tessera.rpc.server import Server

__all__ = [
    "DRAIN_PATIENCE_SECONDS",
    "FORGOTTEN",
    "Check",
    "Client",
    "Loads",
    "ModelServer",
    "Peers",
    "RpcSettings",
    "Runtime",
    "Server",
    "set_environment_defaults",
    "until_back",
]
