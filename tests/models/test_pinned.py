"""Vectors change with the version of their family alone; what compares others with the reference pins too."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tessera.models import families, open_model
from tests.models.conftest import WriteCheckpoint
from tests.models.pinned import FILE, OTHERS, Found, assert_pinned, merged, sums
from tests.models.running import found_by


@pytest.mark.parametrize("name", OTHERS)
def test_vectors_of_families_that_are_not_carried(name: str, written: WriteCheckpoint) -> None:
    spec, inputs = OTHERS[name]
    model = open_model(written(spec))
    assert_pinned(model, name, found_by(model, inputs))


def test_each_family_is_pinned() -> None:
    assert {family.name for family in families()} <= set(json.loads(FILE.read_text()))


@pytest.fixture
def found(written: WriteCheckpoint) -> Callable[[np.ndarray], Found]:
    model = open_model(written(OTHERS["bert_colbert"][0]))
    return lambda values: Found(model=model, case="some", values=values)


def test_other_vectors_need_another_version(
    found: Callable[[np.ndarray], Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(0).normal(size=(7, 32)).astype(np.float32)
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    model = found(values).model
    pins = merged({}, [found(values)])
    assert merged(pins, [found(values + 1e-6)]) == pins
    turned = values.copy()
    # By a cosine of 0.9998 of one of seven.
    turned[3] += 0.02 * np.roll(values[3], 1)
    for others in (turned, values[:6], values[::-1], values[:, ::-1]):
        with pytest.raises(ValueError, match=re.escape("its version is still")):
            merged(pins, [found(others)])
    monkeypatch.setattr(type(model), "version", type(model).version + 1)
    assert merged(pins, [found(turned)])[model.family]["cases"] == {"some": sums(turned)}
    with pytest.raises(AssertionError, match="nothing is pinned"):
        assert_pinned(model, "bert_colbert", turned)
    monkeypatch.setattr(type(model), "version", 0)
    with pytest.raises(ValueError, match="has version 0, after"):
        merged(pins, [found(values)])


def test_the_version_is_part_of_the_fingerprint(
    written: WriteCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    path: Path = written(OTHERS["bert_colbert"][0])
    model = open_model(path)
    before = model.fingerprint
    monkeypatch.setattr(type(model), "version", type(model).version + 1)
    assert open_model(path).fingerprint != before
