"""What a family does not do is refused: by the key of a file that asks for it, or by the input's name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from tessera.errors import CheckpointError, InvalidInput
from tessera.image_plan import ImagePlan
from tessera.models import open_model
from tessera.models.base import Role
from tessera_tools.random_checkpoint import colbert, encoder, llama, llama_rerank, ministral3, qwen3, towers
from tessera_tools.random_checkpoint.spec import Spec
from tests.models.changing import changed
from tests.models.conftest import WriteCheckpoint
from tests.models.running import prompt_of

PICTURES: Final = "preprocessor_config.json"
PROCESSOR: Final = "processor_config.json"
PROMPTS: Final = "config_sentence_transformers.json"
STANFORD: Final = "artifact.metadata"
TOKENS: Final = "tokenizer_config.json"

SPECS: Final[dict[str, Spec]] = {
    "bert": encoder.TINY,
    "bert_rerank": encoder.RERANK_TINY,
    "bert_colbert, PyLate": colbert.PYLATE_TINY,
    "bert_colbert, Stanford": colbert.TINY,
    "clip": towers.CLIP_TINY,
    "llama_nemotron_embed": llama.TINY,
    "llama_nemotron_rerank": llama_rerank.TINY,
    "nemotron_3_embed": ministral3.TINY,
    "nemotron_3_5_embed": ministral3.VL_TINY,
    "nemotron_colembed_vl": qwen3.COLEMBED_TINY,
    "qwen3_embedding": qwen3.TINY,
    "qwen3_rerank": qwen3.RERANK_TINY,
    "qwen3_rerank, classifier": replace(qwen3.RERANK_TINY, layout="classifier"),
    "qwen3_vl_embedding": qwen3.VL_TINY,
    "siglip": towers.SIGLIP_TINY,
    "siglip2": towers.SIGLIP2_TINY,
    "splade": encoder.SPLADE_TINY,
}
TWO_LABELS: Final = {"id2label": {"0": "a", "1": "b"}}
YARN: Final = {"rope_type": "yarn", "factor": 4.0}
SHORT_YARN: Final = {**YARN, "original_max_position_embeddings": 64}
ROPE: Final = "text_config.rope_scaling"

# By family: a part of the complaint, the values of keys, and their file unless it is config.json.
REFUSED: Final[dict[str, list[tuple[str, dict[str, Any]] | tuple[str, dict[str, Any], str]]]] = {
    "bert": [
        ("position_embedding_type", {"position_embedding_type": "relative_key"}),
        ("is_decoder is true; decoders are not supported", {"is_decoder": True}),
        ("auto_map names code", {"auto_map": {"AutoModel": "jina--modeling_bert.JinaBertModel"}}),
        ("hidden_act", {"hidden_act": "gelu_fast"}),
        ("must be a multiple of num_attention_heads 7", {"num_attention_heads": 7}),
        ("'bert' is served with", {"architectures": ["BertForTokenClassification"]}),
        ("model_type 'mpnet' is none of", {"model_type": "mpnet"}),
        ("model_type 'modernbert' is none of", {"model_type": "modernbert"}),
    ],
    "bert_rerank": [
        ("one label", TWO_LABELS),
        ("one label", {"id2label": None}),
        ("position_embedding_type", {"position_embedding_type": "relative_key"}),
        ("activation tanh", {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}),
    ],
    "bert_colbert, PyLate": [
        ("model_type 'modernbert' is none of", {"model_type": "modernbert"}),
        (r"has no token '\[X\] '", {"query_prefix": "[X] "}, PROMPTS),
        ("do not begin with tokens of their own", {"query_prefix": "[D] "}, PROMPTS),
        ("do not begin with tokens of their own", {"query_prefix": "", "document_prefix": ""}, PROMPTS),
        ("skiplist_words must be a list of strings", {"skiplist_words": [1]}, PROMPTS),
        ("similarity_fn_name is meanmaxsim", {"similarity_fn_name": "meanmaxsim"}, PROMPTS),
        ("similarity_fn_name must be one of", {"similarity_fn_name": "hamming"}, PROMPTS),
        ("in_features is 64", {"in_features": 64}, "1_Dense/config.json"),
    ],
    "bert_colbert, Stanford": [
        ("similarity must be one of", {"similarity": "l2"}, STANFORD),
        ("query_maxlen must be at least 4", {"query_maxlen": 3}, STANFORD),
        (r"has no token '\[Q\]'", {"query_token_id": "[Q]"}, STANFORD),
        ("auto_map names code", {"auto_map": {"AutoModel": "modeling.Model"}}),
    ],
    "clip": [
        ("crop_size must be", {"crop_size": {"height": 32, "width": 32}}, PICTURES),
        ("size must be a shortest_edge of at least 64", {"size": {"shortest_edge": 32}}, PICTURES),
        ("resample must be 2", {"resample": 1}, PICTURES),
        ("do_normalize is false", {"do_normalize": False}, PICTURES),
        ("rescale_factor must be 1/255", {"rescale_factor": 1.0}, PICTURES),
        ("image_std must be three numbers", {"image_std": [0, 1, 1]}, PICTURES),
        ("projection.weight.* must have shape", {"projection_dim": 40}),
    ],
    "llama_nemotron_embed": [
        ("architectures", {"architectures": ["LlamaForCausalLM"]}),
        ("attention_bias", {"attention_bias": True}),
        ("is_causal", {"is_causal": True}),
        ("pooling must be one of", {"pooling": "colbert"}),
        ("hidden_size is missing", {"hidden_size": None}),
        ("has id 1999, but vocab_size is 100", {"vocab_size": 100}),
        ("must lie in 1..512", {"matryoshka_dimensions": [384, 1024]}),
        ("rope_type", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    ],
    "llama_nemotron_rerank": [
        ("one label", TWO_LABELS),
        ("temperature", {"temperature": 0.0}),
        ("pooling", {"pooling": "colbert"}),
        (
            "'llama_bidirec' is served with .*not .'LlamaForCausalLM'.",
            {"architectures": ["LlamaForCausalLM"]},
        ),
    ],
    "nemotron_3_embed": [
        ("architectures", {"architectures": ["Ministral3ForCausalLM"]}),
        ("pooling must be one of", {"pooling": "colbert"}),
        ("sliding_window is set", {"sliding_window": 4096}),
        ("hidden_act must be one of", {"hidden_act": "gelu"}),
        ("rope_type must be one of", {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}),
        ("original_max_position_embeddings is missing", {"rope_parameters": YARN}),
        (
            "beta_fast must be above beta_slow",
            {"rope_parameters": {**SHORT_YARN, "beta_fast": 1.0, "beta_slow": 2.0}},
        ),
        ("is missing", {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}}),
    ],
    "nemotron_3_5_embed": [
        ("is served with one of the architectures", {"architectures": ["MistralModel"]}),
        ("text_config.model_type must be one of", {"text_config": {"model_type": "mistral"}}),
        ("vision_config.model_type must be one of", {"vision_config": {"model_type": "clip"}}),
        ("vision_feature_layer must be -1", {"vision_feature_layer": -2}),
        (r"\[IMG\] has id 2010, but config.json says 3", {"image_token_index": 3}),
        ("patch_size must be 14", {"patch_size": 16}, PROCESSOR),
        ("spatial_merge_size must be 2", {"spatial_merge_size": 1}, PROCESSOR),
        (r"added_tokens lacks '\[END\]'", {"image_end_token": "[END]"}, PROCESSOR),
        ("size.height must be the width", {"size": {"height": 100, "width": 90}}, PICTURES),
        ("do_rescale is false", {"do_rescale": False}, PICTURES),
        ("has no chat template", {"chat_template": None}, TOKENS),
        (
            "writes more behind the text",
            {"chat_template": "{{ messages[-1].content[0].text }} and more"},
            TOKENS,
        ),
    ],
    "nemotron_colembed_vl": [
        ("pooling must be one of", {"pooling": "mean"}),
        ("architectures", {"architectures": ["Qwen3VLModel"]}),
        ("has no chat template", {"chat_template": None}, TOKENS),
        ("is no template", {"chat_template": "{% if %}"}, TOKENS),
        ("never", {"chat_template": "{{ raise_exception('never') }}"}, TOKENS),
        ("writes 0 placeholders and 0 texts", {"chat_template": "hello"}, TOKENS),
    ],
    "qwen3_embedding": [
        ("architectures", {"architectures": ["Qwen3ForTokenClassification"]}),
        ("attention_bias", {"attention_bias": True}),
        ("use_sliding_window", {"use_sliding_window": True}),
        ("num_key_value_heads", {"num_key_value_heads": 3}),
        ("hidden_act", {"hidden_act": "gelu"}),
        ("rope_type", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        ("head_dim", {"head_dim": 31}),
        ("hidden_size is missing", {"hidden_size": None}),
    ],
    "qwen3_rerank": [
        ("a score of one token", {"false_token_id": None}, "1_LogitScore/config.json"),
        ("lacks the tokens yes and no", {"true_token_id": 2048}, "1_LogitScore/config.json"),
        ("architectures", {"architectures": ["Qwen3ForTokenClassification"]}),
        ("activation tanh", {"activation_fn": "torch.nn.Tanh"}, PROMPTS),
    ],
    "qwen3_rerank, classifier": [("one label", TWO_LABELS)],
    "qwen3_vl_embedding": [
        ("architectures", {"architectures": ["Qwen3VLMoe"]}),
        ("must be out_hidden_size 128", {"text_config.hidden_size": 256}),
        ("behind 3 layers", {"text_config.num_hidden_layers": 2}),
        ("attention_bias", {"text_config.attention_bias": True}),
        ("mrope_interleaved is false", {f"{ROPE}.mrope_interleaved": False}),
        ("three counts that interleave to 16", {f"{ROPE}.mrope_section": [8, 8, 8]}),
        ("three counts that interleave to 16", {f"{ROPE}.mrope_section": [4, 6, 6]}),
        ("must be a square", {"vision_config.num_position_embeddings": 145}),
        ("must ascend", {"vision_config.deepstack_visual_indexes": [2, 1]}),
        ("within the 4 blocks", {"vision_config.deepstack_visual_indexes": [4]}),
        ("four times num_heads 3", {"vision_config.num_heads": 3}),
        ("temporal_patch_size must be 2", {"vision_config.temporal_patch_size": 1}),
        ("hidden_act", {"vision_config.hidden_act": "gelu"}),
        ("<.image_pad.> has id 2012, but config.json says 5", {"image_token_id": 5}),
        ("patch_size must be 16", {"patch_size": 14}, PICTURES),
    ],
    "siglip": [
        ("size must be", {"size": {"height": 32, "width": 32}}, PICTURES),
        ("makes no vector", {"vision_config.vision_use_head": False}),
        ("num_channels must be 3", {"vision_config.num_channels": 1}),
        ("at least patch_size", {"vision_config.image_size": 8}),
        ("the text tower's vectors are 96 wide", {"vision_config.hidden_size": 128}),
        ("must be a multiple of num_attention_heads", {"text_config.num_attention_heads": 5}),
    ],
    "siglip2": [("patch_size must be 16", {"patch_size": 14}, PICTURES)],
    "splade": [
        ("pooling_strategy must be one of", {"pooling_strategy": "mean"}, "1_SpladePooling/config.json"),
        ("activation_function must be", {"activation_function": "gelu"}, "1_SpladePooling/config.json"),
        ("task 'sparse'; family bert does 'embed' alone", {"architectures": ["BertModel"]}),
    ],
}


@pytest.mark.parametrize(
    ("family", "case"),
    [(family, case) for family, cases in REFUSED.items() for case in cases],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_files_that_are_refused(family: str, case: Any, written: WriteCheckpoint, tmp_path: Path) -> None:
    words, changes, *file = case
    path = changed(written(SPECS[family]), tmp_path / "changed", *file, **changes)
    with pytest.raises(CheckpointError, match=words) as raised:
        model = open_model(path)
        assert model.output.activation
        model.load_text(dtype="float32", device="cpu")
    assert str(path) in raised.value.message


@pytest.mark.parametrize("family", ["bert", "llama_nemotron_embed", "nemotron_3_embed", "qwen3_embedding"])
@pytest.mark.parametrize(
    ("parts", "more", "words"),
    [
        ((), {}, "is empty: it has no text"),
        (("", ""), {"role": Role.QUERY}, "is empty: it has no text"),
        (("a", ImagePlan(units=4, rows=1)), {}, "{family} reads text alone"),
        (("a",), {"role": Role.PASSAGE, "instruction": "Find"}, "an instruction"),
        (((5, 6), "a"), {}, "combines token ids"),
        (((5, 4000),), {}, "outside the vocabulary"),
        (("river " * 40_000,), {}, "over the limit of 8192"),
    ],
)
def test_inputs_that_are_refused(
    family: str, parts: Any, more: dict[str, Any], words: str, written: WriteCheckpoint
) -> None:
    with pytest.raises(InvalidInput, match=words.format(family=family)) as caught:
        prompt_of(open_model(written(SPECS[family])), *parts, **more)
    assert caught.value.param == "input[3]"
