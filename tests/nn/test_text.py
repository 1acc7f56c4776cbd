"""The text tower beside transformers' models: packed, with DeepStack rows, and without a final norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tessera.nn.forms.plain import Residual
from tessera.nn.sequences import Packed
from tessera.nn.spec import HeadSpec, RopeSpec, TextSpec
from tessera.nn.tensors import TextTensors
from tessera.nn.text import Head, TextTower
from tests.nn import peers
from tests.nn.copying import copy, noise, randomise
from tests.nn.test_attention import BOUNDS, CPU, LENGTHS, POSITIONS, spec

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
}
IDS = torch.arange(sum(LENGTHS), dtype=torch.int32) * 7 % 50
NO_ROWS = torch.zeros(0, 48), torch.zeros(0, dtype=torch.int32)


def tower(module: nn.Module, **changes: Any) -> TextTower:
    values: dict[str, Any] = {
        "vocab_size": 50,
        "layers": 4,
        "layer": spec(qk_norm=True, causal=True),
        "rope": RopeSpec(theta=1e6),
        "pooling": "last",
    }
    found = TextTower(TextSpec(**(values | changes)))
    copy(found, module)
    assert {name: tuple(value.shape) for name, value in module.state_dict().items()} == found.spec.shapes()
    return found.prepare(CPU)


@pytest.fixture(scope="module")
def qwen3() -> peers.Qwen3Model:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    config = peers.Qwen3Config(**SIZES, rope_parameters=rope)
    config._attn_implementation = "eager"
    module = peers.Qwen3Model(config)
    module.eval()
    randomise(module)
    return module


@pytest.mark.parametrize("pooling", ["last", "mean", "first", "none"])
@torch.no_grad()
def test_causal_tower(qwen3: peers.Qwen3Model, pooling: str) -> None:
    states = [qwen3(part[None].long()).last_hidden_state[0] for part in IDS.split(LENGTHS)]
    reduce = {
        "last": lambda state: state[-1:],
        "first": lambda state: state[:1],
        "mean": lambda state: state.mean(0, keepdim=True),
        "none": lambda state: state,
    }
    found = tower(qwen3, pooling=pooling)(TextTensors(IDS, POSITIONS, BOUNDS, LENGTHS, *NO_ROWS))
    expected = torch.cat([reduce[pooling](state) for state in states])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_parts_are_the_whole_and_overwrite_no_weights(qwen3: peers.Qwen3Model) -> None:
    module = tower(qwen3)
    embedded = module.embed(IDS, *NO_ROWS)
    assert len(embedded) == 1
    parts = module.pooled(embedded, POSITIONS, BOUNDS, LENGTHS)
    assert torch.equal(parts, module(TextTensors(IDS, POSITIONS, BOUNDS, LENGTHS, *NO_ROWS)))


@torch.no_grad()
def test_without_the_final_norm(qwen3: peers.Qwen3Model) -> None:
    module = tower(qwen3)
    sequences = Packed(BOUNDS, LENGTHS)
    normed = module.encode(module.embed(IDS, *NO_ROWS), POSITIONS, sequences)
    assert module.norm is not None
    norm, module.norm = module.norm, None
    state = module.encode(module.embed(IDS, *NO_ROWS), POSITIONS, sequences)
    torch.testing.assert_close(norm(Residual(state)), normed)
    assert not torch.allclose(state, normed)


@torch.no_grad()
def test_rows_of_earlier_layers_are_added_behind_them() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}
    config = peers.Qwen3VLTextConfig(**SIZES, rope_parameters=rope)
    config._attn_implementation = "eager"
    reference = peers.Qwen3VLTextModel(config).eval()
    randomise(reference)
    sections = RopeSpec(theta=1e6, sections=(4, 2, 2), interleaved=True)
    module = tower(reference, rope=sections, levels=2, pooling="none")
    # The second sequence has three vision rows, the last has two; their positions are of three axes.
    index = torch.tensor([3, 4, 5, 30, 31], dtype=torch.int32)
    positions = POSITIONS.repeat(3, 1)
    positions[1:, index.long()] += torch.tensor([[1, 0, 2, 0, 1], [0, 3, 1, 2, 0]], dtype=torch.int32)
    rows = noise(5, 3 * 48)
    found = module(TextTensors(IDS, positions, BOUNDS, LENGTHS, rows, index))
    start = 0
    for length in LENGTHS:
        part = slice(start, start + length)
        mine = (index >= start) & (index < start + length)
        at = index[mine].long() - start
        embedded = reference.embed_tokens(IDS[part].long())
        embedded[at] = rows[mine, :48]
        expected = reference(
            inputs_embeds=embedded[None],
            position_ids=positions[:, None, part].long(),
            visual_pos_masks=torch.zeros(1, length, dtype=torch.bool).index_fill(1, at, True),
            deepstack_visual_embeds=[rows[mine, 48:96], rows[mine, 96:]],
        ).last_hidden_state[0]
        torch.testing.assert_close(found[part], expected, rtol=1e-4, atol=1e-4)
        start += length


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_head_computes_in_float32_whatever_its_weights_are(bias: bool) -> None:
    head = Head(HeadSpec(width=3, bias=bias, temperature=0.5), 48)
    randomise(head)
    rows = noise(5, 48)
    half = Head(HeadSpec(width=3, bias=bias, temperature=0.5), 48).to(torch.bfloat16)
    half.load_state_dict(head.state_dict())
    exact = rows.double() @ half.weight.double().T + (half.bias.double() if bias else 0)
    found = half(rows)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact / 0.5, rtol=1e-5, atol=1e-5)


def test_shapes_with_a_head() -> None:
    plain = TextSpec(vocab_size=50, layers=1, layer=spec(), rope=RopeSpec(theta=1e6), pooling="mean")
    whole = replace(plain, head=HeadSpec(width=3, bias=True))
    assert (plain.width, whole.width) == (plain.layer.hidden, 3)
    added = {"text.head.weight": (3, plain.layer.hidden), "text.head.bias": (3,)}
    assert whole.shapes("text.") == plain.shapes("text.") | added
