"""The configuration of ``llama_nemotron_vl`` for transformers, which ``vllm_copy`` puts into a copy for vLLM.

Nothing of Tessera is imported: vLLM loads it from the copy's folder.
"""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, PretrainedConfig, SiglipVisionConfig


class LlamaBidirectionalConfig(LlamaConfig):
    """The backbone's, under the name by which vLLM knows its architecture."""

    model_type = "llama_bidirec"


class LlamaNemotronVLConfig(PretrainedConfig):
    """Both towers; whatever else ``config.json`` holds is an attribute of its name."""

    model_type = "llama_nemotron_vl"
    is_composition = True
    sub_configs = {"llm_config": LlamaBidirectionalConfig, "vision_config": SiglipVisionConfig}

    def __init__(
        self,
        llm_config: dict[str, Any] | None = None,
        vision_config: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        self.llm_config = LlamaBidirectionalConfig(**_without_type(llm_config))
        self.llm_config.architectures = ["LlamaBidirectionalModel"]
        self.vision_config = SiglipVisionConfig(**_without_type(vision_config))
        super().__init__(**others)

    def get_text_config(self, *args: Any, **others: Any) -> LlamaBidirectionalConfig:
        return self.llm_config


def _without_type(values: dict[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (values or {}).items() if name != "model_type"}
