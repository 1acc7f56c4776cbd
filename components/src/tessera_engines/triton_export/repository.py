"""A Triton model repository of one checkpoint: the stages apart behind a router, or all in one model."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tessera.errors import ConfigError
from tessera.models.base import Model, OutputKind
from tessera.models.stages import StageModule, StageTensor
from tessera_engines.compiled.build import Progress
from tessera_engines.compiled.spec import AxisRanges
from tessera_engines.compiled.stages import load_stage
from tessera_engines.triton_export.onnx_file import require_exporter, write_onnx

_TYPES = {
    "uint8": "TYPE_UINT8",
    "int32": "TYPE_INT32",
    "float32": "TYPE_FP32",
    "float16": "TYPE_FP16",
    "bfloat16": "TYPE_BF16",
}
_DELAY_MICROSECONDS = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The ``config.pbtxt`` of one model; with ``max_batch`` 0 the first axis is no batch axis.

    ``batched`` lets Triton wait for more requests; ``ragged`` lets these differ in their open axes.
    """

    name: str
    backend: str
    max_batch: int
    inputs: Sequence[StageTensor]
    outputs: Sequence[StageTensor]
    optional: frozenset[str] = frozenset()
    parameters: Mapping[str, str] | None = None
    batched: bool = False
    ragged: bool = False

    def text(self) -> str:
        lines = [
            f'name: "{self.name}"',
            f'backend: "{self.backend}"',
            f"max_batch_size: {self.max_batch}",
            *(self._tensor("input", tensor) for tensor in self.inputs),
            *(self._tensor("output", tensor) for tensor in self.outputs),
        ]
        if self.batched:
            preferred = ", ".join(str(size) for size in (4, 8, 16, 32, 64) if size <= self.max_batch)
            sizes = f"  preferred_batch_size: [ {preferred} ]\n" if preferred else ""
            delay = f"  max_queue_delay_microseconds: {_DELAY_MICROSECONDS}\n"
            lines.append(f"dynamic_batching {{\n{sizes}{delay}}}")
        for key, value in (self.parameters or {}).items():
            lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
        return "\n".join(lines) + "\n"

    def _tensor(self, kind: str, tensor: StageTensor) -> str:
        axes = tensor.axes[1:] if self.max_batch else tensor.axes
        dims = ", ".join(str(axis) if isinstance(axis, int) else "-1" for axis in axes)
        # A tensor needs one dimension beside the batch.
        shape = f"dims: [ {dims} ]" if axes else "dims: [ 1 ] reshape { shape: [ ] }"
        extra = " optional: true" if tensor.name in self.optional else ""
        if kind == "input" and self.ragged:
            extra += " allow_ragged_batch: true"
        return f'{kind} {{ name: "{tensor.name}" data_type: {_TYPES[tensor.dtype]} {shape}{extra} }}'


SPLIT = {"vit": "vision", "embed": "embed", "lm": "lm", "post": "post"}
"""Models of the repository with a router, and the stages that they are."""

FUSED = "model_1"
ROUTER = "router"


class TritonRepository:
    """Writes models below ``directory``, one ONNX file and one ``config.pbtxt`` each."""

    def __init__(self, model: Model, directory: Path, ranges: AxisRanges, *, dtype: str) -> None:
        """``ranges`` are the largest sizes.

        Raises ``ConfigError`` if the router cannot handle ``dtype``, or naming a family whose images are not
        made of independent units, since it joins those of all rows, or one with a vector of each token.
        """
        if model.output.kind is OutputKind.TOKENS:
            raise ConfigError(
                f"family {model.family} gives a vector of each token, a Triton repository one for each input"
            )
        if model.vision is None or not model.vision.independent_units:
            raise ConfigError(
                f"family {model.family}: a Triton repository takes images of independent units alone"
            )
        if dtype not in ("float32", "float16"):
            raise ConfigError(f"a Triton repository has dtype float32 or float16, not {dtype}")
        require_exporter()
        self._model, self._vision = model, model.vision
        self._directory = directory
        self._ranges = ranges
        self._dtype = dtype

    def write_fused(self, progress: Progress) -> None:
        progress(f"exporting {FUSED}")
        self._write(FUSED, self._load("fused"), self._ranges["sequences"].max, batched=True)

    def write_split(self, progress: Progress, *, image_token_id: int) -> None:
        """Write the stages and the router; ``image_token_id`` is the placeholder of a vision row."""
        sequences, units = (self._ranges[axis].max for axis in ("sequences", "units"))
        stages = {}
        for name, stage in SPLIT.items():
            progress(f"exporting {name}")
            loaded = stages[name] = self._load(stage)
            # The router makes the batches; Triton could not join the inputs of embed, which differ in length.
            self._write(name, loaded, {"vit": units, "embed": 0}.get(name, sequences), batched=False)
        progress(f"writing {ROUTER}")
        self._write_router(
            stages["vit"],
            stages["post"],
            {
                "image_token_id": str(image_token_id),
                "rows_per_unit": str(self._vision.rows(1)),
                "row_width": str(self._vision.row_width),
                "max_units": str(units),
                "dtype": self._dtype,
                # Tensors stay on the GPU between the models.
                "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
            },
        )

    def _load(self, stage: str) -> StageModule:
        return load_stage(self._model, stage, layout="padded", dtype=self._dtype, device="cpu")

    def _write(self, name: str, stage: StageModule, max_batch: int, *, batched: bool) -> None:
        version = self._directory / name / "1"
        version.mkdir(parents=True)
        write_onnx(stage, self._ranges, version / "model.onnx")
        config = ModelConfig(
            name=name,
            backend="onnxruntime",
            max_batch=max_batch,
            inputs=stage.inputs,
            outputs=stage.outputs,
            batched=batched,
        )
        (version.parent / "config.pbtxt").write_text(config.text())

    def _write_router(self, vision: StageModule, post: StageModule, parameters: Mapping[str, str]) -> None:
        version = self._directory / ROUTER / "1"
        version.mkdir(parents=True)
        shutil.copyfile(Path(__file__).with_name("router_model.py"), version / "model.py")
        tiles = StageTensor(name="tiles", dtype="uint8", axes=("sequences", *vision.inputs[0].axes))
        ids = tuple(
            StageTensor(name=name, dtype="int32", axes=("sequences", "tokens"))
            for name in ("input_ids", "attention_mask")
        )
        config = ModelConfig(
            name=ROUTER,
            backend="python",
            max_batch=self._ranges["sequences"].max,
            inputs=(*ids, tiles),
            outputs=post.outputs,
            optional=frozenset({"attention_mask", "tiles"}),
            parameters=parameters,
            batched=True,
            ragged=True,
        )
        (version.parent / "config.pbtxt").write_text(config.text())
