"""Towers with learned positions and post-norm layers: beside transformers' own, and in every form."""

from __future__ import annotations

import pytest
import torch

from tessera.checkpoint.loading import stored_names
from tessera.models.encoder.body import BERT
from tessera.models.encoder.config import Names
from tessera.nn.encoder import EncoderTower
from tessera.nn.forms.plain import PLAIN, Form, Residual, Rows
from tessera.nn.layer import SOURCES, Block, LayerNorm
from tessera.nn.spec import EncoderSpec, HeadSpec, LayerSpec
from tessera.nn.tensors import TextTensors
from tests.nn import peers
from tests.nn.copying import randomise
from tests.nn.test_forms import InPlace, Pending

LAYERS, LENGTHS = 4, (7, 1, 5)


class Strict(InPlace):
    """As the fused form, whose norms have an offset each, if it is of zeros."""

    def prepare(self, block: Block) -> None:
        if isinstance(block, LayerNorm):
            block.offset = torch.zeros_like(block.weight)

    def layer_norm(self, stream: Residual, norm: LayerNorm) -> Rows:
        assert norm.offset is not None
        return super().layer_norm(stream, norm)


def spec(activation: str = "gelu", head: HeadSpec | None = None) -> EncoderSpec:
    layer = LayerSpec.encoder(48, 4, 96, activation=activation, eps=1e-12, post_norm=True)
    return EncoderSpec(
        vocab_size=100, layers=LAYERS, layer=layer, pooling="mean", head=head, positions=16, types=2
    )


def run(tower: EncoderTower) -> torch.Tensor:
    """Three sequences, the second half of each of type 1."""
    total = sum(LENGTHS)
    places = torch.cat([torch.arange(length) for length in LENGTHS])
    types = torch.cat([(torch.arange(length) > length // 2).int() for length in LENGTHS])
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    ids = torch.randint(0, 100, (total,), generator=torch.Generator().manual_seed(3)).int()
    positions = torch.stack([places.int(), types])
    none = torch.empty(0, 48), torch.empty(0, dtype=torch.int32)
    return tower(TextTensors(ids, positions, bounds, LENGTHS, *none))


def tower(form: Form, **more: object) -> EncoderTower:
    built = EncoderTower(spec(**more))  # type: ignore[arg-type]
    randomise(built)
    built.prepare(torch.device("cpu"), form)
    return built


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
@torch.no_grad()
def test_it_is_that_of_bert(activation: str) -> None:
    config = peers.BertConfig(
        vocab_size=100,
        hidden_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=96,
        hidden_act=activation,
        max_position_embeddings=16,
    )
    reference = peers.BertModel(config, add_pooling_layer=False).eval()
    randomise(reference)
    named = Names(LAYERS, BERT)
    stored = {named(name): value for name, value in reference.state_dict().items()}
    built = EncoderTower(spec(activation))
    for name, parameter in built.named_parameters():
        parameter.copy_(torch.cat([stored[source] for source in stored_names(f"text.{name}", SOURCES)]))
    built.prepare(torch.device("cpu"), PLAIN)
    total = sum(LENGTHS)
    ids = torch.randint(0, 100, (total,), generator=torch.Generator().manual_seed(3))
    expected, start = [], 0
    for length in LENGTHS:
        types = (torch.arange(length) > length // 2).long()
        output = reference(input_ids=ids[None, start : start + length], token_type_ids=types[None])
        expected.append(output.last_hidden_state[0].mean(0))
        start += length
    torch.testing.assert_close(run(built), torch.stack(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", [None, HeadSpec(width=1, bias=True)], ids=["vectors", "scores"])
@pytest.mark.parametrize("form", ["in place", "pending"])
@torch.inference_mode()
def test_the_same_rows_in_every_form(form: str, head: HeadSpec | None) -> None:
    """Biases that norms add begin anew behind each norm, which renews the stream."""
    expected = run(tower(PLAIN, head=head))
    built = tower(Strict(), head=head)
    assert all(layer.mlp.down_proj.deferred for layer in built.layers.layers)
    if form == "pending":
        for layer in built.layers.layers[1:-1]:
            layer.run_in_fp8(Pending())
    torch.testing.assert_close(run(built), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(run(built), expected, rtol=1e-4, atol=1e-4)
