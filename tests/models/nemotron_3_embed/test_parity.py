"""Every layer against transformers' own, and vectors against the library that the files are for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tessera.models import open_model
from tessera.models.base import Role
from tessera.models.nemotron_3_embed.model import Nemotron3Embed, Options
from tessera.nn.forms.plain import Residual
from tessera_tools.random_checkpoint.ministral3 import TINY
from tests.models.conftest import WriteCheckpoint
from tests.models.nemotron_3_embed.cases import CASES
from tests.models.parity import (
    BARS,
)
from tests.models.running import cosines
from tests.models.test_parity import FAMILIES, parity_of
from tests.references.ministral3 import PREFIXES, Ministral3Reference

pytestmark = pytest.mark.parity

NEMOTRON = FAMILIES["nemotron_3_embed"]


@torch.no_grad()
@pytest.mark.parametrize("name", NEMOTRON.configurations)
def test_hidden_states_stage_by_stage(name: str, written: WriteCheckpoint) -> None:
    """The rotation, its scale of queries, and every layer's output, far beyond the original context."""
    path = written(NEMOTRON.configurations[name], dtype="bfloat16")
    model, reference = Nemotron3Embed(path, Options()), Ministral3Reference(path)
    text = model.load_text(dtype="float32", device="cpu")
    tokens = reference.tokens("the river under the bridge " * 60, "none")
    count = len(tokens)
    ids, at = torch.tensor(tokens, dtype=torch.int32), torch.arange(count, dtype=torch.int32)[None]
    rotation = text.rotary(at)
    cosines_, sines = reference.model.rotary_emb(torch.zeros(1, dtype=torch.float32), at.long())
    half = cosines_.shape[-1] // 2
    # Frequencies differ by a rounding, which position 500 multiplies.
    torch.testing.assert_close(rotation.cosines[:, 0], cosines_[0, :, :half], atol=1e-4, rtol=0)
    torch.testing.assert_close(rotation.sines[:, 0], sines[0, :, :half], atol=1e-4, rtol=0)
    outputs: list[torch.Tensor] = []
    for layer in reference.model.layers:
        layer.register_forward_hook(lambda _, __, given: outputs.append(given[0]))
    last = reference.hidden(tokens)
    found: list[torch.Tensor] = []
    bounds = torch.tensor([0, count], dtype=torch.int32)
    sequences = text.form.packed(bounds, [count])
    (embedded,) = text.embed(ids, torch.empty(0, model.text.row_width), torch.empty(0, dtype=torch.int32))

    def keep(number: int, stream: Residual) -> None:
        found.append(text.layers.output(stream, number).clone())

    text.layers(Residual(embedded), sequences, rotation, keep)
    for ours, theirs in zip(found, outputs, strict=True):
        assert cosines(ours.numpy(), theirs.reshape(count, -1).numpy()).min() >= 0.99999
    whole = text.encode((embedded,), at, sequences)
    assert cosines(whole.numpy(), last.numpy()).min() >= 0.99999


def test_the_library_that_the_files_are_for_gives_the_same(written: WriteCheckpoint) -> None:
    """``sentence-transformers`` reads ``is_causal``, the modules and the prompts itself."""
    from sentence_transformers import SentenceTransformer

    path = written(TINY, dtype="bfloat16")
    theirs = SentenceTransformer(str(path), device="cpu", model_kwargs={"torch_dtype": torch.float32})
    names = {Role.QUERY: "query", Role.PASSAGE: "document", Role.NONE: None}
    assert {name: theirs.prompts[name] for name in ("query", "document")} == {
        "query": PREFIXES["query"],
        "document": PREFIXES["passage"],
    }
    expected = [theirs.encode("".join(map(str, each.parts)), prompt_name=names[each.role]) for each in CASES]
    found = parity_of("nemotron_3_embed").found(open_model(path))
    assert cosines(found, np.stack(expected)).min() >= BARS["float32"]
