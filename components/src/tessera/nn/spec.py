"""What a stack of transformer layers is made of: sizes and choices, without torch.

Configurations of families hold these; the modules beside this one are built from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from tessera.checkpoint.declared import Dense, LayerNorm, Step

Activation = Literal["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu"]
"""The names that configurations use. ``gelu`` is the exact form; the next two are both the tanh form."""

Pooling = Literal["mean", "last", "first", "none", "max", "mean_sqrt_len", "weighted_mean"]
RopeType = Literal["default", "linear", "llama3", "yarn"]
CHANNELS: Final = 3
"""Those of a pixel: every vision tower reads RGB."""

Shapes = dict[str, tuple[int, ...]]
"""Shapes of stored tensors by name."""


def linear_shapes(name: str, inner: int, columns: int, *, bias: bool = True) -> Shapes:
    """The weight of a product and its bias, if it has one."""
    return {f"{name}.weight": (columns, inner)} | ({f"{name}.bias": (columns,)} if bias else {})


def norm_shapes(name: str, width: int, *, bias: bool = True) -> Shapes:
    """The weight of a norm and its bias, which a LayerNorm has."""
    return {f"{name}.{part}": (width,) for part in (("weight", "bias") if bias else ("weight",))}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding, its scaling, and which axis of the positions each frequency reads.

    ``low_freq_factor`` and ``high_freq_factor`` are of llama3, ``beta_fast`` to ``truncate`` of yarn; an
    ``attention_factor`` of None follows from the others. ``sections`` counts the frequencies of each axis
    (mRoPE): chunked, or with ``interleaved`` one of each axis in turn for as long as the section lasts, and
    the first axis where it has ended. ``query_beta`` is that of Llama 4's query scaling, 0 for none.
    """

    theta: float
    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True
    sections: tuple[int, ...] = ()
    interleaved: bool = False
    query_beta: float = 0.0

    @property
    def axes(self) -> int:
        """How many rows of positions there are."""
        return max(1, len(self.sections))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """A layer: a norm and attention, then a norm and an MLP, each added to the residual stream.

    ``norm`` is RMSNorm or LayerNorm. ``heads`` is a multiple of ``kv_heads``. ``qk_norm`` puts an RMSNorm
    over each head of queries and keys, before they are rotated. With ``post_norm`` the stream goes on from
    what a norm gives, not from what it read: the norm behind a layer is the first of the next one.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    activation: str
    norm: Literal["rms", "layer"]
    eps: float
    gated: bool
    causal: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    post_norm: bool = False

    @classmethod
    def encoder(
        cls,
        hidden: int,
        heads: int,
        intermediate: int,
        *,
        activation: str,
        eps: float,
        post_norm: bool = False,
    ) -> LayerSpec:
        """A layer of a vision transformer or of BERT: LayerNorm, a bias in every product, no gate."""
        return cls(
            hidden=hidden,
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            intermediate=intermediate,
            activation=activation,
            norm="layer",
            eps=eps,
            gated=False,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            post_norm=post_norm,
        )

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def shapes(self) -> Shapes:
        """The tensors of one layer as checkpoints hold them, by the names of Llama and Qwen.

        q, k, v, gate and up are stored apart. An MLP without a gate has up and down.
        """
        hidden, wide = self.hidden, self.intermediate
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer_norm = self.norm == "layer"
        shapes = norm_shapes("input_layernorm", hidden, bias=layer_norm)
        for name, columns in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            shapes |= linear_shapes(f"self_attn.{name}", hidden, columns, bias=self.qkv_bias)
        shapes |= linear_shapes("self_attn.o_proj", queries, hidden, bias=self.out_bias)
        shapes |= norm_shapes("post_attention_layernorm", hidden, bias=layer_norm)
        for name in ("gate_proj", "up_proj") if self.gated else ("up_proj",):
            shapes |= linear_shapes(f"mlp.{name}", hidden, wide, bias=self.mlp_bias)
        shapes |= linear_shapes("mlp.down_proj", wide, hidden, bias=self.mlp_bias)
        if self.qk_norm:
            shapes |= {f"self_attn.{name}.weight": (self.head_dim,) for name in ("q_norm", "k_norm")}
        return shapes

    def stacked(self, layers: int, prefix: str = "") -> Shapes:
        """The tensors of so many layers, by their numbers behind ``prefix``."""
        shapes = self.shapes()
        return {f"{prefix}{number}.{name}": shapes[name] for number in range(layers) for name in shapes}

    def activations(self) -> int:
        """Elements alive for each row at the widest point of a layer, beside the weights.

        Attention is computed without its score matrix by every kernel in use, so what counts is linear in
        rows: the residual stream, a norm's output, and the widest product with its input.
        """
        queries = self.heads * self.head_dim
        # q, k and v; their copies for a kernel, or as they are before they are rotated; and its output.
        # Where the kernel takes no groups, keys and values are repeated for each head of queries.
        attention = 2 * self.qkv_width + queries + (2 * queries if self.kv_heads < self.heads else 0)
        mlp = self.hidden + (4 if self.gated else 2) * self.intermediate
        return 2 * self.hidden + max(attention, mlp)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """A linear map of pooled rows to ``width`` numbers in float32, divided by ``temperature``.

    With ``contrast`` a number is the logit of one row of weights less that of another. With ``dense`` the
    rows first go through a product as wide as they are, and this function.
    """

    width: int
    bias: bool = False
    temperature: float = 1.0
    contrast: bool = False
    dense: Literal["tanh", "relu"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularySpec:
    """A head that weights the vocabulary: a product, an activation, LayerNorm, and the decoder of BERT's MLM.

    A decoder that is ``tied`` is the table of token embeddings. An input's weights are the largest of its
    tokens, or with ``sums`` their sum; with ``twice`` the logarithm is taken of each weight again. ``most``
    are kept. ``logits`` bounds how many there are at a time, unless a token has more.
    """

    vocab_size: int
    hidden: int
    activation: str
    eps: float
    tied: bool
    most: int
    sums: bool = False
    twice: bool = False
    # In float32 134 MB; of 16,000 tokens and 30,522 ids they would be 2 GB.
    logits: int = 1 << 25

    def shapes(self, prefix: str = "") -> Shapes:
        """The stored tensors by name; ``prefix`` goes before each."""
        shapes = linear_shapes("dense", self.hidden, self.hidden) | norm_shapes("norm", self.hidden)
        shapes["bias"] = (self.vocab_size,)
        if not self.tied:
            shapes["weight"] = (self.vocab_size, self.hidden)
        return {f"{prefix}{name}": shape for name, shape in shapes.items()}

    @property
    def piece(self) -> int:
        """Tokens whose logits are there at a time."""
        return max(1, self.logits // self.vocab_size)

    def activations(self, tokens: int) -> tuple[int, int]:
        """Elements alive at the widest point of so many tokens: in the head's own type, and of 4 bytes.

        They are the rows that the decoder reads, with those before, and a piece's logits. Of 4 bytes are the
        states, a piece's weights with what they are made of, and the rows of as many inputs as tokens, with
        their ids.
        """
        piece = min(tokens, self.piece) * self.vocab_size
        return 3 * self.hidden * tokens + piece, self.hidden * tokens + 3 * piece + 4 * self.most * tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSpec:
    """A text tower: token embeddings, layers, a final norm, pooling.

    ``levels`` is how many of the first layers take vision rows of their own behind them (DeepStack): a
    vision row is then ``(1 + levels) * hidden`` wide. With ``final_norm`` false the output is the last
    layer's. ``head`` is a product behind the pooling: a score, or a projection of each vector.

    ``besides`` are further ways of pooling, whose rows stand behind those of ``pooling``. ``steps`` follow,
    as the checkpoint declares them in files of their own, and ``cut`` is how many numbers of a row stay.
    """

    vocab_size: int
    layers: int
    layer: LayerSpec
    rope: RopeSpec
    pooling: Pooling
    levels: int = 0
    final_norm: bool = True
    head: HeadSpec | None = None
    besides: tuple[Pooling, ...] = ()
    steps: tuple[Step, ...] = ()
    cut: int | None = None

    @property
    def width(self) -> int:
        """Numbers in a row of the output."""
        if self.cut is not None:
            return self.cut
        products = [step.width for step in self.steps if isinstance(step, Dense)]
        return products[-1] if products else self.pooled_width

    @property
    def pooled_width(self) -> int:
        """Numbers in a row before the steps."""
        return (1 + len(self.besides)) * (self.layer.hidden if self.head is None else self.head.width)

    @property
    def row_width(self) -> int:
        return (1 + self.levels) * self.layer.hidden

    def shapes(self, prefix: str = "") -> Shapes:
        """The stored tensors by name; ``prefix`` goes before each."""
        hidden = self.layer.hidden
        shapes: Shapes = {"embed_tokens.weight": (self.vocab_size, hidden)}
        shapes |= self.layer.stacked(self.layers, "layers.")
        if self.final_norm:
            shapes |= norm_shapes("norm", hidden, bias=self.layer.norm == "layer")
        if self.head is not None:
            shapes["head.weight"] = (self.head.width, hidden)
            if self.head.bias:
                shapes["head.bias"] = (self.head.width,)
            if self.head.contrast:
                shapes["head.against"] = (self.head.width, hidden)
            if self.head.dense is not None:
                shapes |= linear_shapes("head.dense", hidden, hidden)
        return {f"{prefix}{name}": shape for name, shape in shapes.items()}

    def step_shapes(self) -> list[Shapes]:
        """The tensors of each step by their names in its own file."""
        return [_step_shapes(step) for step in self.steps]

    def activations(self, tokens: int) -> int:
        """Elements alive at the widest point of so many tokens, beside the weights."""
        return tokens * (self.layer.activations() + self.levels * self.layer.hidden)


def _step_shapes(step: Step) -> Shapes:
    if isinstance(step, LayerNorm):
        return norm_shapes("norm", step.width)
    if not isinstance(step, Dense):
        return {}
    shapes = linear_shapes("linear", step.inner, step.width, bias=step.bias)
    if step.residual and step.inner != step.width:
        shapes |= linear_shapes("residual", step.inner, step.width, bias=False)
    return shapes


_NO_ROPE: Final = RopeSpec(theta=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec(TextSpec):
    """A tower whose first rows are the sum of tokens, learned positions and token types.

    ``positions`` and ``types`` count the rows of their tables, 0 where there are no types; ``rope`` has no
    part. With ``skips`` the positions have a row more: how many of a sequence's first tokens pooling leaves
    out, the same at each of its tokens. With ``keyed`` that row is how many of them all tokens look at. A
    tower has one of the two at most.
    """

    positions: int
    types: int = 0
    skips: bool = False
    keyed: bool = False
    rope: RopeSpec = _NO_ROPE

    def shapes(self, prefix: str = "") -> Shapes:
        """The stored tensors by name; ``prefix`` goes before each."""
        hidden = self.layer.hidden
        shapes = TextSpec.shapes(self, prefix)
        shapes[f"{prefix}embed_positions.weight"] = (self.positions, hidden)
        if self.types:
            shapes[f"{prefix}embed_types.weight"] = (self.types, hidden)
        return shapes
