"""What a running deployment writes: a line for each request and role, its id in it, none of its content."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.e2e.disaggregated import Disaggregated
from tests.e2e.inputs import image_input, picture
from tests.e2e.service import MODEL
from tests.waiting import wait_until

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("shared-service")]

TEXT = "a sentence that is nobody's business"
QUERY = "signature=not-for-the-log"


def lines(service: Disaggregated) -> list[dict[str, Any]]:
    """Every line that any process of the deployment has written; all of them are JSON."""
    written = service.running.log.read_bytes().splitlines()
    # The installation comes before any process.
    return [json.loads(line) for line in written if not line.startswith(b"tessera: installing")]


def about(service: Disaggregated, request_id: str) -> dict[str, list[dict[str, Any]]]:
    """The lines about one request by the role that wrote them.

    The first image finds out by which route rows travel, and a line about that has the image's id, too.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for line in lines(service):
        if line.get("request_id") == request_id and line["target"] != "tessera.transport.inbox":
            found.setdefault(line["role"], []).append(line)
    return found


def wait_about(service: Disaggregated, request_id: str, *roles: str) -> dict[str, dict[str, Any]]:
    """The one line of each role, once all are there."""
    wait_until(
        lambda: set(roles) <= about(service, request_id).keys(), said=lambda: about(service, request_id)
    )
    found = about(service, request_id)
    assert found.keys() == set(roles)
    assert all(len(written) == 1 for written in found.values()), found
    return {role: written[0] for role, written in found.items()}


Ask = Callable[..., tuple[str, httpx.Response]]


@pytest.fixture
def ask(service: Disaggregated) -> Ask:
    """Sends a request with an id of its own."""

    def post(body: dict[str, Any], path: str = "/v1/embeddings", key: str = service.key) -> Any:
        request_id = f"log-{uuid.uuid4().hex}"
        headers = {"authorization": f"Bearer {key}", "x-request-id": request_id}
        answer = httpx.post(f"{service.url}{path}", json=body, headers=headers, timeout=60)
        assert answer.headers["x-request-id"] == body.get("request_id", request_id)
        return request_id, answer

    return post


def test_one_line_in_each_role_that_had_a_part(service: Disaggregated, ask: Ask) -> None:
    images = [image_input(picture(7000 + index), TEXT) for index in range(3)]
    request_id, answer = ask({"model": MODEL, "input": [*images, TEXT]}, f"/v1/embeddings?{QUERY}")
    assert answer.status_code == 200
    found = wait_about(service, request_id, "frontend", "embed", "encode")
    front, embed, encode = found["frontend"], found["embed"], found["encode"]
    assert (front["method"], front["route"], front["status"]) == ("POST", "/v1/embeddings", 200)
    assert (front["key"], front["inputs"], front["images"]) == ("shared", 4, 3)
    assert front["tokens"] == answer.json()["usage"]["prompt_tokens"] == embed["tokens"]
    assert (embed["inputs"], embed["images"], embed["outcome"], embed["calls"]) == (4, 3, "ok", 1)
    assert (encode["images"], encode["outcome"]) == (3, "ok")
    assert front["duration_ms"] >= embed["duration_ms"] >= encode["duration_ms"] > 0
    assert all(line["level"] == "INFO" for line in found.values())


def test_text_leaves_no_line_at_the_encode_worker(service: Disaggregated, ask: Ask) -> None:
    request_id, _ = ask({"input": TEXT})
    named, _ = ask({"input": TEXT, "request_id": "named-by-the-body"})
    wait_about(service, request_id, "frontend", "embed")
    wait_about(service, "named-by-the-body", "frontend", "embed")
    assert about(service, named) == {}


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"input": TEXT, "colour": TEXT}, 400, "invalid_input", "colour"),
        ({"input": TEXT, TEXT: 1}, 400, "invalid_input", None),
        ({"input": TEXT, "model": TEXT}, 404, "model_not_found", "model"),
        (
            {"input": [[{"type": "image_url", "image_url": {"url": f"http://127.0.0.1:9/a.png?{QUERY}"}}]]},
            422,
            "media_fetch_failed",
            "input[0][0].image_url.url",
        ),
        (
            {"input": [[{"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJDREVGRw=="}}]]},
            415,
            "unsupported_media",
            "input[0][0].image_url.url",
        ),
    ],
)
def test_a_refusal_names_the_input_and_repeats_nothing(
    service: Disaggregated, ask: Ask, body: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    request_id, answer = ask(body)
    assert answer.status_code == status, answer.text
    line = wait_about(service, request_id, "frontend")["frontend"]
    assert (line["status"], line["code"], line.get("param")) == (status, code, param)
    assert line["level"] == "INFO" and "error" not in line


def test_a_client_that_hangs_up_leaves_one_line(service: Disaggregated) -> None:
    headers = {"authorization": f"Bearer {service.key}", "x-request-id": "hung-up"}
    body = {"input": [image_input(picture(7300 + index, 700)) for index in range(12)]}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{service.url}/v1/embeddings", json=body, headers=headers, timeout=httpx.Timeout(30, read=0.05)
        )
    found = wait_until(lambda: about(service, "hung-up").get("frontend"))
    assert found is not None
    assert [(line["status"], line["code"], line["level"]) for line in found] == [(499, "cancelled", "INFO")]


def test_an_unknown_key_and_route(service: Disaggregated, ask: Ask) -> None:
    request_id, _ = ask({"input": TEXT}, key="sk-somebody-elses-key")
    line = wait_about(service, request_id, "frontend")["frontend"]
    assert line["status"] == 401 and "key" not in line
    request_id, _ = ask({}, "/v1/embedding%0Aforged")
    line = wait_about(service, request_id, "frontend")["frontend"]
    assert (line["route"], line["path"]) == ("other", "/v1/embedding\nforged")


def test_ids_that_could_forge_lines_are_replaced(service: Disaggregated) -> None:
    given = []
    for offered in ("x" * 129, "a b", "\u00e9"):
        headers = {"authorization": f"Bearer {service.key}", "x-request-id": offered.encode()}
        answer = httpx.post(f"{service.url}/v1/embeddings", json={"input": "x"}, headers=headers)
        given.append(answer.headers["x-request-id"])
        assert given[-1] != offered
    for request_id in given:
        wait_about(service, request_id, "frontend", "embed")


def test_polls_leave_no_line(service: Disaggregated) -> None:
    before = [line for line in lines(service) if line.get("route")]
    with httpx.Client(base_url=service.url, headers={"authorization": f"Bearer {service.key}"}) as http:
        paths = ("/health", "/ping", "/live", "/metrics", "/v1/metrics", "/status", "/v1/health/ready", "/")
        for path in paths:
            assert http.get(path).status_code == 200
        # The page is for everybody, and work at its path is not.
        assert httpx.post(f"{service.url}/", json={"inputs": TEXT}).status_code == 401
        last = http.get("/v1/models").headers["x-request-id"]
    wait_about(service, last, "frontend")
    after = [line for line in lines(service) if line.get("route")]
    assert [line["route"] for line in after[len(before) :]] == ["/", "/v1/models"]


def test_nothing_of_a_request_is_in_any_line(service: Disaggregated, ask: Ask) -> None:
    image = picture(7100)
    request_id, _ = ask({"input": [image_input(image, TEXT)]}, f"/v1/embeddings?{QUERY}")
    wait_about(service, request_id, "frontend", "embed", "encode")
    ask({"input": TEXT, "colour": TEXT})
    ask({"input": TEXT}, key="sk-somebody-elses-key")
    written = service.running.log.read_text()
    for secret in (service.key, "sk-somebody", TEXT, QUERY, base64.b64encode(image).decode()[:60], "Bearer"):
        assert secret not in written


def test_dynamo_says_nothing_of_single_requests(service: Disaggregated, ask: Ask) -> None:
    request_id, _ = ask({"input": [image_input(picture(7200))]})
    wait_about(service, request_id, "frontend", "embed", "encode")
    from_dynamo = [line for line in lines(service) if not line["target"].startswith(("tessera", "launch"))]
    assert [line for line in from_dynamo if line["level"] == "INFO"] == []
