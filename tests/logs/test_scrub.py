"""Messages that quote others: what must not be in a log is taken out, and the rest stays."""

from __future__ import annotations

import base64
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.logs import MOST_CHARACTERS, scrub

IMAGE = base64.b64encode(random.Random(0).randbytes(600)).decode()


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"cannot read 'data:image/png;base64,{IMAGE}' as an image", IMAGE[:40]),
        (f"cannot read DATA:,{IMAGE[:30]}", IMAGE[:30]),
        (f"not an image: {IMAGE}", IMAGE[:40]),
        ("GET https://host.example/a.png?X-Amz-Signature=0123abcd failed", "0123abcd"),
        ("GET https://user:hunter2@host.example/a.png failed", "hunter2"),
        ("GET https://host.example/a.png#part failed", "part"),
        ("no proxy at http://proxy:hunter2@10.0.0.1:3128", "hunter2"),
        ("header Authorization: Bearer sk-0123456789", "sk-0123456789"),
        ("header X-API-Key: sk-0123456789", "sk-0123456789"),
        ("{'api_key': 'sk-0123456789'}", "sk-0123456789"),
    ],
)
def test_secrets_and_files_are_taken_out(text: str, secret: str) -> None:
    assert secret in text
    assert secret not in scrub(text)


@pytest.mark.parametrize(
    "text",
    [
        "instance 764ddca93940a3ba of tessera.embed.generate: connection refused",
        "listening on http://127.0.0.1:8000",
        "dyn://tessera.encode.generate",
        "the API key is missing or not known; send Authorization",
        "fingerprint " + "0123456789abcdef" * 4,
        "GET https://host.example/photos/a.png failed",
        'File "/opt/tessera/worker.py", line 12, in run',
    ],
)
def test_the_rest_stays(text: str) -> None:
    assert scrub(text) == text


def test_of_a_long_text_the_end_stays() -> None:
    text = scrub("where it began " + "step " * 10_000 + "ValueError: what happened")
    assert text.startswith("where it began") and text.endswith("ValueError: what happened")
    assert "characters left out" in text and len(text) < MOST_CHARACTERS + 100


@given(st.text())
def test_any_text_can_be_scrubbed_and_stays_bounded(text: str) -> None:
    assert len(scrub(text * 1000)) <= MOST_CHARACTERS + 100 * (1 + text.count(":"))
