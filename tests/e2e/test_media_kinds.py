"""Pictures that are none of the served formats, over HTTP."""

from __future__ import annotations

import base64
import io

import httpx
import pytest
from PIL import Image

from tests.e2e.disaggregated import Disaggregated
from tests.e2e.service import MODEL

pytestmark = [pytest.mark.service, pytest.mark.xdist_group("shared-service")]


def jpeg_2000() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), "red").save(file, "JPEG2000")
    return file.getvalue()


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("a JPEG XL picture", b"\0\0\0\x0cJXL \r\n\x87\n\0\0\0\x14ftypjxl "),
        ("a JPEG 2000 picture", jpeg_2000()),
        ("an SVG drawing", b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'),
    ],
    ids=["JPEG XL", "JPEG 2000", "SVG"],
)
def test_a_picture_of_another_format_is_refused_by_its_name(
    service: Disaggregated, kind: str, data: bytes
) -> None:
    image = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    answer = httpx.post(
        f"{service.url}/v1/embeddings",
        json={"model": MODEL, "input": ["a text", {"image": image}]},
        headers={"authorization": f"Bearer {service.key}"},
        timeout=60,
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (415, "unsupported_media", "input[1].image")
    assert kind in error["message"] and "JPEG, PNG" in error["message"]
