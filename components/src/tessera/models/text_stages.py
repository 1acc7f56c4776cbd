"""The text stage of any ``TextTower`` for compilers, whole and in its three parts, padded and packed.

A padded batch holds one sequence in each row, padded on the right; ``attention_mask`` is 1 for a token and 0
for padding, and every row has at least one token. ``vision_map`` says for each token which vision row
takes its place, -1 for none, so that nothing has to look for the places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from torch.nn.functional import embedding, pad

from tessera.checkpoint.loading import fill, torch_dtype
from tessera.errors import ConfigError
from tessera.models.stages import Axis, StageModule, StageTensor
from tessera.nn.forms.choice import exported
from tessera.nn.forms.plain import PLAIN, Form
from tessera.nn.layer import SOURCES
from tessera.nn.loading import load_text
from tessera.nn.sequences import Masked, Padded, pool
from tessera.nn.spec import TextSpec
from tessera.nn.text import Embedded, TextTower, finished

if TYPE_CHECKING:
    from tessera.models.tower import TowerModel

TEXT_STAGES = ("text", "embed", "lm", "post")
_EPSILON = 1e-12
_POOLINGS: Final = {"mean", "last", "first", "none"}
_PART: Final = "text."


class Embed(nn.Module):
    """Token embeddings with the vision rows in their places."""

    def __init__(self, tower: TextTower) -> None:
        super().__init__()
        self.embed_tokens = tower.embed_tokens
        self._levels = tower.spec.levels

    def forward(
        self, input_ids: torch.Tensor, vision_rows: torch.Tensor, vision_map: torch.Tensor
    ) -> Embedded:
        """int32 ``[...]``, ``[..., row_width]`` and int32 ``[...]`` to ``[..., width]``; at least one row."""
        embedded: torch.Tensor = self.embed_tokens(input_ids)
        placed = embedding(vision_map.clamp(min=0), vision_rows.flatten(0, -2).to(embedded.dtype))
        is_row, hidden = (vision_map >= 0).unsqueeze(-1), embedded.shape[-1]
        whole = torch.where(is_row, placed[..., :hidden], embedded)
        return (whole, torch.where(is_row, placed[..., hidden:], 0)) if self._levels else (whole,)


class PaddedLayers(nn.Module):
    """The layers and the final norm over a padded batch."""

    def __init__(self, tower: TextTower) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, embedded: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """``[sequences, tokens, hidden]`` and int32 ``[sequences, tokens]`` to the former's shape."""
        sequences, tokens = attention_mask.shape
        positions = torch.arange(tokens, device=embedded.device).repeat(sequences)[None]
        layout = Padded(attention_mask != 0)
        hidden = self.tower.encode((embedded.flatten(0, 1),), positions, layout)
        return hidden.view(embedded.shape)


class PaddedPool(nn.Module):
    """Pooling over a padded batch, the head if there is one, and L2 unless rows stay as they are."""

    def __init__(self, tower: TextTower, *, unit_length: bool = True) -> None:
        super().__init__()
        self.spec, self.head, self.steps = tower.spec, tower.head, tower.steps
        self.scaled = unit if unit_length else unscaled

    def forward(
        self, hidden: torch.Tensor, attention_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 rows ``[sequences, width]`` and float32 ``[sequences]``, the lengths they had."""
        layout, rows = Padded(attention_mask != 0), hidden.flatten(0, 1)
        pooled = pool(rows, layout, self.spec.pooling)
        return self.scaled(finished(pooled, rows, layout, self))


class PaddedText(nn.Module):
    """The whole text stage over a padded batch."""

    def __init__(self, tower: TextTower, *, unit_length: bool = True) -> None:
        super().__init__()
        self.embed = Embed(tower)
        self.lm = PaddedLayers(tower)
        self.post = PaddedPool(tower, unit_length=unit_length)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        vision_rows: torch.Tensor,
        vision_map: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (embedded,) = self.embed(input_ids, vision_rows, vision_map)
        vectors, norms = self.post(self.lm(embedded, attention_mask), attention_mask)
        return vectors, norms


class PackedText(nn.Module):
    """The whole text stage over a packed batch; ``ends`` says behind which token each sequence ends.

    Where there is no kernel for sequences whose lengths the host does not know, attention is over the whole
    batch with a mask, as ``nn.sequences.Masked`` says.
    """

    def __init__(self, tower: TextTower, *, unit_length: bool = True) -> None:
        super().__init__()
        self.embed = Embed(tower)
        self.tower = tower
        self.scaled = unit if unit_length else unscaled
        self.fused_attention = _has_kernel(tower)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        ends: torch.Tensor,
        vision_rows: torch.Tensor,
        vision_map: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cu_seqlens = pad(ends, (1, 0))
        sequences = self.tower.form.packed(cu_seqlens, ()) if self.fused_attention else Masked(cu_seqlens)
        embedded = self.embed(input_ids, vision_rows, vision_map)
        hidden = self.tower.encode(embedded, positions, sequences)
        return self.scaled(self.tower.rows(hidden, sequences))


def unit(pooled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 rows scaled to length 1, and their lengths; a row shorter than 1e-12 is divided by that."""
    norms = pooled.square().sum(-1).sqrt()
    return pooled / norms.clamp(min=_EPSILON)[:, None], norms


def unscaled(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 rows as they are, with norms of 1, as ``tessera.rows.Rows`` has them."""
    return rows, torch.ones_like(rows[:, 0])


def _has_kernel(tower: TextTower) -> bool:
    if tower.form is PLAIN:
        return False
    from tessera.nn.kernels.attention import supports

    return supports(tower.spec.layer.head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextStages:
    """The text stages of a model's checkpoint."""

    model: TowerModel
    dtype: str
    device: str
    max_sequences: int

    @property
    def spec(self) -> TextSpec:
        return self.model.stored_text

    @property
    def unit_length(self) -> bool:
        return self.model.output.unit_length

    def load(self, stage: str, layout: str) -> StageModule:
        """Build one of ``TEXT_STAGES`` and read its weights, and no others.

        Raises ``CheckpointError`` as the loaders do, and ``ConfigError`` for what there is not, before
        anything is read.
        """
        if self.spec.pooling not in _POOLINGS or set(self.spec.besides) - _POOLINGS:
            raise ConfigError(
                f"family {self.model.family}: {self.spec.pooling} is declared as pooling, of which nothing is"
                " compiled; use engine: torch"
            )
        if layout == "packed":
            return self._packed()
        self._require_padded()
        return {"text": self._text, "embed": self._embed, "lm": self._lm, "post": self._post}[stage]()

    def _require_padded(self) -> None:
        """Raises ``ConfigError`` naming a family whose sequences can only be packed."""
        spec = self.spec
        if spec.rope.axes > 1 or spec.levels or spec.pooling == "none":
            raise ConfigError(
                f"family {self.model.family} has no padded layout, which has one position for each token, one"
                " row for each placeholder and one vector for each sequence; packed has more"
            )

    def _tower(self, form: Form) -> TextTower:
        tensors = self.model.all_tensors()
        return load_text(self.spec, tensors, part=_PART, dtype=self.dtype, device=self.device, form=form)

    def _packed(self) -> StageModule:
        tower = self._tower(exported(self.device, self.dtype, max_sequences=self.max_sequences))
        module = PackedText(tower, unit_length=self.unit_length)
        each = "tokens" if self.spec.pooling == "none" else "sequences"
        return StageModule(
            module=module.eval(),
            inputs=(
                StageTensor(name="input_ids", dtype="int32", axes=("tokens",)),
                StageTensor(name="positions", dtype="int32", axes=(self.spec.rope.axes, "tokens")),
                StageTensor(name="ends", dtype="int32", axes=("sequences",)),
                self._rows("rows"),
                StageTensor(name="vision_map", dtype="int32", axes=("tokens",)),
            ),
            outputs=self._vectors(each),
            fused_attention=module.fused_attention,
        )

    def _text(self) -> StageModule:
        inputs = (_ids("input_ids"), _ids("attention_mask"), self._rows("rows"), _ids("vision_map"))
        module = PaddedText(self._tower(PLAIN), unit_length=self.unit_length).eval()
        return StageModule(module=module, inputs=inputs, outputs=self._vectors())

    def _embed(self) -> StageModule:
        tower = self._empty()
        self._fill(tower.embed_tokens, "embed_tokens.")
        return StageModule(
            module=Embed(tower).eval(),
            inputs=(_ids("input_ids"), self._rows(*self.model.image_axes), _ids("vision_map")),
            outputs=(self._hidden("embedded"),),
        )

    def _lm(self) -> StageModule:
        tower = self._empty()
        self._fill(tower.layers, "layers.")
        if tower.norm is not None:
            self._fill(tower.norm, "norm.")
        del tower.embed_tokens
        tower.head, tower.steps = None, nn.ModuleList()
        tower.prepare(torch.device(self.device), PLAIN)
        return StageModule(
            module=PaddedLayers(tower).eval(),
            inputs=(self._hidden("embedded"), _ids("attention_mask")),
            outputs=(self._hidden("hidden"),),
        )

    def _post(self) -> StageModule:
        tower = self._empty()
        if tower.head is not None:
            self._fill(tower.head, "head.")
        self._fill(tower.steps, "steps.")
        return StageModule(
            module=PaddedPool(tower, unit_length=self.unit_length).eval(),
            inputs=(self._hidden("hidden"), _ids("attention_mask")),
            outputs=self._vectors(),
        )

    def _empty(self) -> TextTower:
        with torch.device("meta"):
            return TextTower(self.spec)

    def _fill(self, module: nn.Module, name: str) -> None:
        fill(
            module,
            self.model.all_tensors(),
            part=_PART + name,
            sources=SOURCES,
            dtype=torch_dtype(self.dtype),
            device=torch.device(self.device),
        )

    def _rows(self, *axes: Axis) -> StageTensor:
        return StageTensor(name="vision_rows", dtype=self.dtype, axes=(*axes, self.spec.row_width))

    def _hidden(self, name: str) -> StageTensor:
        return StageTensor(name=name, dtype=self.dtype, axes=("sequences", "tokens", self.spec.layer.hidden))

    def _vectors(self, each: str = "sequences") -> tuple[StageTensor, ...]:
        """The outputs of the whole stage, and of its last part; a vector may be a score, one number."""
        return (
            StageTensor(name="vectors", dtype="float32", axes=(each, self.spec.width)),
            StageTensor(name="norms", dtype="float32", axes=(each,)),
        )


def _ids(name: str) -> StageTensor:
    return StageTensor(name=name, dtype="int32", axes=("sequences", "tokens"))
