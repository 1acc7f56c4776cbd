"""An API with a form, an answer and errors of its own: a vector for each of some phrases."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final

import msgspec

from tessera.frontend.api.body import Form, Kind, ModelName, about, several
from tessera.frontend.api.content import InputBuilder
from tessera.frontend.api.endpoint import Translated
from tessera.frontend.api.formats import ResponseBody
from tessera.frontend.api.openai import finished
from tessera.frontend.api.routes import ApiRoute
from tessera.frontend.api.schema import NUMBERS, STRING, TEXT, list_of, object_of
from tessera.frontend.api.values import Json, JsonObject, string
from tessera.frontend.http.errors import Failure
from tessera.frontend.request import EmbeddingsRequest
from tessera.frontend.service import ClientApi, Service
from tessera.frontend.serving.pipeline import Result
from tessera.frontend.serving.served import Served
from tessera.models.base import Role


class PhrasesRequest(msgspec.Struct, kw_only=True):
    """Declares the body of ``/phrases``."""

    phrases: Annotated[
        tuple[str, ...], several(Kind(string, STRING), most=8), about("A vector for each.", ["a cat"])
    ]
    model: ModelName = None


FORM: Final = Form(PhrasesRequest)


def _translate(value: Json, served: Served) -> Translated:
    body = FORM.read(value)
    builder = InputBuilder(role=Role.QUERY, limits=served.limits)
    named = [(phrase, f"phrases[{index}]") for index, phrase in enumerate(body.phrases)]
    inputs = tuple(builder.build((builder.text(phrase, param),), param) for phrase, param in named)
    request = EmbeddingsRequest(inputs=inputs, model=body.model)
    return Translated(request=request, write=partial(_write, request, served))


def _write(request: EmbeddingsRequest, served: Served, result: Result) -> ResponseBody:
    values = finished(result.rows.values, request, served.output)
    return ResponseBody.of_json({"vectors": list(values)})


def write_error(failure: Failure) -> tuple[int, JsonObject]:
    return failure.status, {"complaint": failure.error["code"]}


def _routes(service: Service) -> list[ApiRoute]:
    return [
        service.endpoint.route(
            "/phrases",
            _translate,
            name="phrases",
            summary="Embed phrases",
            body=FORM.schema,
            answer=object_of(vectors=list_of(NUMBERS)),
            error=object_of(complaint=TEXT),
        )
    ]


API: Final = ClientApi("Phrases", _routes, error=write_error)
