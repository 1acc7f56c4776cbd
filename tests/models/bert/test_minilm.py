"""The published weights of all-MiniLM-L6-v2, against transformers and the values of its authors' library."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

from tessera.engine.batch import PackedInput, pack
from tessera.models import open_model
from tessera.models.base import Content, Truncate
from tests import minilm
from tests.models.running import Given, batch_of, cosines, vectors
from tests.references.encoder import EncoderReference

pytestmark = pytest.mark.parity

# Latin, Cyrillic, Greek, Hebrew, Arabic, Devanagari, Thai, Hangul, kana, Han, emoji, marks, accents alone.
SCRIPTS = [
    *((0x61, 0x7A), (0x41, 0x5A), (0xC0, 0x24F), (0x400, 0x4FF), (0x3B1, 0x3C9), (0x5D0, 0x5EA)),
    *((0x627, 0x64A), (0x900, 0x97F), (0xE01, 0xE30), (0xAC00, 0xD7A3), (0x3041, 0x30FF)),
    *((0x4E00, 0x9FFF), (0x1F600, 0x1F640), (0x21, 0x2F), (0x300, 0x330)),
]


def texts(count: int) -> list[str]:
    """Words of many scripts, of a token to more than the model takes."""
    source = random.Random(0)

    def word() -> str:
        first, last = source.choice(SCRIPTS)
        return "".join(chr(source.randint(first, last)) for _ in range(source.randint(1, 8)))

    return [" ".join(word() for _ in range(source.choice([1, 2, 5, 20, 60, 120]))) for _ in range(count)]


def test_the_weights_are_those_that_were_published() -> None:
    content = (minilm.directory() / "model.safetensors").read_bytes()
    assert hashlib.sha256(content).hexdigest() == minilm.SHA256


def test_the_values_of_the_authors_library() -> None:
    model = open_model(minilm.directory())
    assert (model.family, model.max_tokens, model.output.width) == ("bert", 256, 384)
    batch = batch_of(model, None, [Given(parts=(text,)) for text in minilm.SENTENCES])
    first, second = vectors(model, model.load_text(dtype="float32", device="cpu"), batch)
    np.testing.assert_allclose(first[:6], minilm.BEGINNING, atol=1e-6)
    assert first @ second == pytest.approx(minilm.PRODUCT, abs=1e-6)


def test_texts_of_many_scripts() -> None:
    """The same tokens as the package's own tokenizer gives, and the same vectors, up to the longest input."""
    path = minilm.directory()
    model, reference = open_model(path), EncoderReference(path)
    reference.tokenizer.enable_truncation(256)
    inputs, expected = [], []
    for number, text in enumerate(texts(200)):
        prompt = model.prompt(
            Content(parts=(text,)), max_tokens=model.max_tokens, truncate=Truncate.END, param="x"
        )
        assert prompt.tokens.tolist() == reference.tokens(text)
        # Vectors follow from tokens: 20 are of all lengths.
        if number < 20:
            expected.append(reference.vector(reference.tokens(text)))
            inputs.append(PackedInput(tokens=prompt.tokens, positions=model.positions(prompt.tokens, ())))
    assert {len(each.tokens) for each in inputs} >= {256}
    found = vectors(model, model.load_text(dtype="float32", device="cpu"), pack(inputs))
    assert cosines(found, np.stack(expected)).min() >= 0.99999
