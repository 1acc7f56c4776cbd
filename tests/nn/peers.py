"""Classes and functions of transformers by their names, imported when a test takes them.

They take 3 s of processor time to import, which every process that collects the tests would spend.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "ACT2FN": "transformers.activations",
    "BertConfig": "transformers",
    "BertModel": "transformers.models.bert.modeling_bert",
    "GemmaConfig": "transformers",
    "GemmaMLP": "transformers.models.gemma.modeling_gemma",
    "LlamaAttention": "transformers.models.llama.modeling_llama",
    "LlamaConfig": "transformers",
    "LlamaRotaryEmbedding": "transformers.models.llama.modeling_llama",
    "Ministral3Attention": "transformers.models.ministral3.modeling_ministral3",
    "Ministral3Config": "transformers",
    "Ministral3RotaryEmbedding": "transformers.models.ministral3.modeling_ministral3",
    "Qwen2Attention": "transformers.models.qwen2.modeling_qwen2",
    "Qwen2Config": "transformers",
    "Qwen2MLP": "transformers.models.qwen2.modeling_qwen2",
    "Qwen2RMSNorm": "transformers.models.qwen2.modeling_qwen2",
    "Qwen2RotaryEmbedding": "transformers.models.qwen2.modeling_qwen2",
    "Qwen2_5_VLRotaryEmbedding": "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "Qwen2_5_VLTextConfig": "transformers.models.qwen2_5_vl.configuration_qwen2_5_vl",
    "Qwen3Attention": "transformers.models.qwen3.modeling_qwen3",
    "Qwen3Config": "transformers",
    "Qwen3Model": "transformers",
    "Qwen3RotaryEmbedding": "transformers.models.qwen3.modeling_qwen3",
    "Qwen3VLTextConfig": "transformers.models.qwen3_vl.configuration_qwen3_vl",
    "Qwen3VLTextModel": "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "Qwen3VLTextRotaryEmbedding": "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "Qwen3VLVisionAttention": "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "Qwen3VLVisionConfig": "transformers.models.qwen3_vl.configuration_qwen3_vl",
    "Qwen3VLVisionMLP": "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "Qwen3VLVisionPatchEmbed": "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "Qwen3VLVisionPatchMerger": "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "ROPE_INIT_FUNCTIONS": "transformers.modeling_rope_utils",
    "SiglipAttention": "transformers.models.siglip.modeling_siglip",
    "SiglipMLP": "transformers.models.siglip.modeling_siglip",
    "SiglipVisionConfig": "transformers.models.siglip.configuration_siglip",
    "apply_rotary_pos_emb": "transformers.models.llama.modeling_llama",
    "get_llama_4_attn_scale": "transformers.models.ministral3.modeling_ministral3",
}


def __getattr__(name: str) -> Any:
    # Such as __path__, which the import system asks for.
    if name not in _MODULES:
        raise AttributeError(name)
    return getattr(importlib.import_module(_MODULES[name]), name)
