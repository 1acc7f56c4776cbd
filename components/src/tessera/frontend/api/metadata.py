"""What NVIDIA's NIM says of itself: ``/v1/metadata``, ``/v1/version``, ``/v1/license`` and ``/v1/manifest``.

The licence is Tessera's, models have their own. Nothing is said of the machine: no directory, no address, and
of a checkpoint no file but its weights.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import distribution
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tessera import __version__
from tessera.checkpoint.weights import weight_sizes
from tessera.frontend.api.routes import ApiRoute, get_route
from tessera.frontend.api.schema import TEXT, WHOLE, object_of
from tessera.frontend.api.values import JsonObject
from tessera.frontend.service import ClientApi, Service
from tessera.frontend.serving.models import Models
from tessera.frontend.serving.served import ServedModel

_DISTRIBUTION: Final = "tessera-embed"


def _info(served: ServedModel) -> JsonObject:
    """Name the hub's commit, or the fingerprint where a directory is served."""
    name, source = served.served.model, served.settings.origin
    if source is None or not source.commit:
        return {"shortName": f"{name}:{served.model.fingerprint}"}
    url = f"hf://{source.repository}@{source.commit}"
    return {"shortName": f"{name}:{source.commit}", "modelUrl": url}


def _listed(served: ServedModel) -> JsonObject:
    """What the manifest says of it: of its files the bytes by their names."""
    source = served.settings.origin
    return {
        "name": served.served.model,
        "names": list(served.served.names),
        "family": served.model.family,
        "source": None if source is None else source.described(),
        "fingerprint": served.model.fingerprint,
        "files": [
            {"path": name, "size_bytes": size} for name, size in weight_sizes(served.model.path).items()
        ],
    }


@cache
def _licence() -> JsonObject:
    installed = distribution(_DISTRIBUTION)
    name, content = installed.metadata["License-Expression"], installed.read_text("licenses/LICENSE") or ""
    encoded = content.encode()
    return {
        "name": name,
        "path": "LICENSE",
        "sha": hashlib.sha256(encoded).hexdigest(),
        "size": len(encoded),
        "url": f"https://spdx.org/licenses/{name}.html",
        "type": "file",
        "content": content,
    }


def _manifest(models: Models) -> str:
    # Nothing else of a frontend needs it.
    import yaml

    written: str = yaml.safe_dump(
        {"models": [_listed(model) for model in models]}, sort_keys=False, allow_unicode=True
    )
    return written


_LICENCE: Final = object_of(
    name=TEXT,
    path=TEXT,
    sha={**TEXT, "description": "SHA-256 of the content."},
    size=WHOLE,
    url=TEXT,
    type=TEXT,
    content=TEXT,
)
_METADATA: Final = object_of(
    assetInfo={"type": "array", "items": TEXT},
    licenseInfo=_LICENCE,
    modelInfo={
        "type": "array",
        "items": object_of(
            optional=("modelUrl",),
            shortName={**TEXT, "description": "The model's name, a colon, its commit or fingerprint."},
            modelUrl={**TEXT, "description": "The repository and the commit, of a model of a hub."},
        ),
    },
    repository_override=TEXT,
    version=TEXT,
)
_MANIFEST: Final = object_of(
    manifest_file={**TEXT, "description": "YAML: the models, where they come from, and their weights."},
    repository_override=TEXT,
)
_VERSION: Final = object_of(release=TEXT, api=TEXT)


def _routes(service: Service) -> list[ApiRoute]:
    models = service.models

    async def metadata(request: Request) -> Response:
        return JSONResponse(
            {
                "assetInfo": [],
                "licenseInfo": _licence(),
                "modelInfo": [_info(model) for model in models],
                "repository_override": "",
                "version": __version__,
            }
        )

    async def version(request: Request) -> Response:
        """Both are Tessera's."""
        return JSONResponse({"release": __version__, "api": __version__})

    async def licence(request: Request) -> Response:
        return JSONResponse(_licence())

    async def manifest(request: Request) -> Response:
        return JSONResponse({"manifest_file": _manifest(models), "repository_override": ""})

    return [
        get_route("/v1/metadata", metadata, _METADATA, 401, summary="What is served, as NIM says it"),
        get_route("/v1/version", version, _VERSION, 401, summary="The release, and that of the API"),
        get_route("/v1/license", licence, _LICENCE, 401, summary="The licence of the software"),
        get_route("/v1/manifest", manifest, _MANIFEST, 401, summary="The files of what is served"),
    ]


API: Final = ClientApi("NIM", _routes)
