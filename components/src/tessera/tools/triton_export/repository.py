"""A Triton model repository of one checkpoint: the stages apart behind a router, or all in one model."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from tessera.engine.compiled.envelope import Envelope
from tessera.engine.compiled.flavours import Progress
from tessera.errors import ConfigError
from tessera.models.base import Model
from tessera.models.stages import StageFamily, StageModule, StageTensor
from tessera.tools.triton_export.onnx_file import require_exporter, write_onnx
from tessera.tools.triton_export.triton_config import ModelConfig

SPLIT = {"vit": "vision", "embed": "embed", "lm": "lm", "post": "post"}
"""Models of the repository with a router, and the stages that they are."""

FUSED = "model_1"
ROUTER = "router"


class TritonRepository:
    """Writes models below ``directory``, one ONNX file and one ``config.pbtxt`` each."""

    def __init__(
        self, model: Model, stages: StageFamily, directory: Path, envelope: Envelope, *, dtype: str
    ) -> None:
        """Raises ``ConfigError`` when no router can handle ``dtype``."""
        if dtype not in ("float32", "float16"):
            raise ConfigError(f"a Triton repository has dtype float32 or float16, not {dtype}")
        require_exporter()
        self._model = model
        self._stages = stages
        self._directory = directory
        self._envelope = envelope
        self._dtype = dtype

    def write_fused(self, progress: Progress) -> None:
        progress(f"exporting {FUSED}")
        self._write(FUSED, self._load("fused"), self._envelope["sequences"].max, batched=True)

    def write_split(self, progress: Progress, *, image_token_id: int) -> None:
        """``image_token_id`` is the placeholder of a vision row among the tokens."""
        sequences, tiles = (self._envelope[axis].max for axis in ("sequences", "tiles"))
        stages = {}
        for name, stage in SPLIT.items():
            progress(f"exporting {name}")
            loaded = stages[name] = self._load(stage)
            # The router makes the batches; Triton could not join the inputs of embed, which differ in length.
            self._write(name, loaded, {"vit": tiles, "embed": 0}.get(name, sequences), batched=False)
        progress(f"writing {ROUTER}")
        self._write_router(
            stages["vit"],
            stages["post"],
            {
                "image_token_id": str(image_token_id),
                "tokens_per_tile": str(self._model.tokens_per_tile),
                "hidden": str(self._model.hidden),
                "max_tiles": str(tiles),
                "dtype": self._dtype,
                # Tensors stay on the GPU between the models.
                "FORCE_CPU_ONLY_INPUT_TENSORS": "no",
            },
        )

    def _load(self, stage: str) -> StageModule:
        return self._stages.load_stage(stage, layout="padded", dtype=self._dtype, device="cpu")

    def _write(self, name: str, stage: StageModule, max_batch: int, *, batched: bool) -> None:
        version = self._directory / name / "1"
        version.mkdir(parents=True)
        write_onnx(stage, self._envelope, version / "model.onnx")
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
            max_batch=self._envelope["sequences"].max,
            inputs=(*ids, tiles),
            outputs=post.outputs,
            optional=frozenset({"attention_mask", "tiles"}),
            parameters=parameters,
            batched=True,
            ragged=True,
        )
        (version.parent / "config.pbtxt").write_text(config.text())
