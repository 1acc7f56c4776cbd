"""A stand-in for the part of the Kubernetes API that discovery uses.

It keeps ``DynamoWorkerMetadata`` objects, and answers for the kubelet and the EndpointSlice controller: a pod
is ready while its ``/health`` answers 200, and the slice of its Service says so. Both can be watched.

    python -m tests.deploy.kubernetes_api PORT NAMESPACE POD=HEALTH_URL...
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

LABELS = {"nvidia.com/dynamo-discovery-backend": "kubernetes", "nvidia.com/dynamo-discovery-enabled": "true"}
GROUPS = {
    "endpointslices": ("discovery.k8s.io/v1", "EndpointSlice"),
    "dynamoworkermetadatas": ("nvidia.com/v1alpha1", "DynamoWorkerMetadata"),
}
EVENT_SECONDS = 0.2


class Store:
    """Objects of each resource by name; every change gets the next version."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.objects: dict[str, dict[str, dict[str, Any]]] = {resource: {} for resource in GROUPS}
        self.events: list[tuple[int, str, dict[str, Any]]] = []
        self.versions = itertools.count(1)
        self.version = 0

    def put(self, resource: str, name: str, content: dict[str, Any]) -> dict[str, Any]:
        known = self.objects[resource].get(name)
        self.version = next(self.versions)
        version, kind = GROUPS[resource]
        metadata = content.get("metadata", {}) | {
            "name": name,
            "namespace": self.namespace,
            "uid": f"uid-{name}",
            "resourceVersion": str(self.version),
            "generation": (known["metadata"]["generation"] if known else 0) + 1,
        }
        full = content | {"apiVersion": version, "kind": kind, "metadata": metadata}
        self.objects[resource][name] = full
        event = {"type": "MODIFIED" if known else "ADDED", "object": full}
        self.events.append((self.version, resource, event))
        return full

    async def watch(self, resource: str, since: int) -> AsyncIterator[bytes]:
        sent = since
        while True:
            for version, owner, event in list(self.events):
                if version > sent and owner == resource:
                    yield json.dumps(event).encode() + b"\n"
            sent = max(sent, self.version)
            await asyncio.sleep(EVENT_SECONDS)


async def probe(store: Store, pods: dict[str, str]) -> None:
    """Follow the pods' readiness, as kubelet and controller do."""
    was: dict[str, bool] = {}
    async with httpx.AsyncClient(timeout=2.0) as client:
        while True:
            ready = {}
            for pod, url in pods.items():
                try:
                    ready[pod] = (await client.get(url)).status_code == 200
                except httpx.TransportError:
                    ready[pod] = False
            if ready != was:
                store.put("endpointslices", "tessera", endpoint_slice(ready))
                was = ready
            await asyncio.sleep(EVENT_SECONDS)


def endpoint_slice(ready: dict[str, bool]) -> dict[str, Any]:
    endpoints = [
        {
            "addresses": ["127.0.0.1"],
            "conditions": {"ready": is_ready, "serving": is_ready, "terminating": False},
            "targetRef": {"kind": "Pod", "name": pod, "uid": f"uid-{pod}"},
        }
        for pod, is_ready in ready.items()
    ]
    return {"metadata": {"labels": LABELS}, "addressType": "IPv4", "endpoints": endpoints, "ports": []}


def application(store: Store) -> Starlette:
    async def collection(request: Request) -> Response:
        resource = request.path_params["resource"]
        if resource not in GROUPS or request.path_params["namespace"] != store.namespace:
            return JSONResponse({"kind": "Status", "code": 404}, status_code=404)
        wanted = dict(
            part.split("=") for part in request.query_params.get("labelSelector", "").split(",") if part
        )
        if resource == "endpointslices" and not wanted.items() <= LABELS.items():
            return JSONResponse({"kind": "Status", "code": 400}, status_code=400)
        if request.query_params.get("watch") == "true":
            since = int(request.query_params.get("resourceVersion") or 0)
            return StreamingResponse(store.watch(resource, since), media_type="application/json")
        version, kind = GROUPS[resource]
        return JSONResponse(
            {
                "apiVersion": version,
                "kind": f"{kind}List",
                "metadata": {"resourceVersion": str(store.version)},
                "items": list(store.objects[resource].values()),
            }
        )

    async def item(request: Request) -> Response:
        resource, name = request.path_params["resource"], request.path_params["name"]
        if request.method == "PATCH" and resource == "dynamoworkermetadatas":
            # Server-side apply: what a writer sends is all that it wants to be there.
            content = yaml.safe_load(await request.body())
            return JSONResponse(store.put(resource, name, content))
        if request.method == "GET" and name in store.objects.get(resource, {}):
            return JSONResponse(store.objects[resource][name])
        return JSONResponse({"kind": "Status", "code": 404}, status_code=404)

    path = "/apis/{group}/{version}/namespaces/{namespace}/{resource}"
    return Starlette(
        routes=[Route(path, collection), Route(path + "/{name}", item, methods=["GET", "PATCH", "DELETE"])]
    )


async def main(port: int, namespace: str, pods: dict[str, str]) -> None:
    store = Store(namespace)
    probing = asyncio.create_task(probe(store, pods))
    config = uvicorn.Config(
        application(store), host="127.0.0.1", port=port, log_level="info", timeout_graceful_shutdown=1
    )
    await uvicorn.Server(config).serve()
    probing.cancel()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], dict(word.split("=", 1) for word in sys.argv[3:])))
