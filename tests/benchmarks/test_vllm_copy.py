"""The copy for vLLM reads a conversation as the service reads the same input."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.vllm_copy import is_chat, main, serve_flags

from tessera.models import open_model
from tessera.models.base import Content, PairLimits, Pairs, Prompt, Truncate
from tessera_tools.random_checkpoint import llama_rerank
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.encoder import ROBERTA_TINY
from tessera_tools.random_checkpoint.encoder import TINY as BERT
from tessera_tools.random_checkpoint.llama_nemotron_vl import TINY
from tessera_tools.random_checkpoint.ministral3 import TINY as NEMOTRON_3_TINY
from tessera_tools.random_checkpoint.qwen3 import COLEMBED_TINY, VL_RERANK_TINY, VL_TINY
from tessera_tools.random_checkpoint.towers import CLIP_TINY

pytestmark = pytest.mark.parity


# What the template writes for an image, and what vLLM's processor makes of it around the placeholders.
@pytest.mark.parametrize(
    ("spec", "mark", "before", "pad", "after"),
    [
        (VL_TINY, "<|image_pad|>", "", "<|image_pad|>", ""),
        (COLEMBED_TINY, "<|image_pad|>", "", "<|image_pad|>", ""),
        (TINY, "<image>", "<img>", "<IMG_CONTEXT>", "</img>"),
    ],
    ids=["qwen", "colembed", "llama"],
)
def test_conversations_become_the_same_tokens(
    tmp_path: Path, spec: object, mark: str, before: str, pad: str, after: str
) -> None:
    from transformers import PreTrainedTokenizerFast

    source, target = tmp_path / "model", tmp_path / "copy"
    write_checkpoint(source, spec)
    assert main([str(source), str(target)]) == 0
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(target))
    model = open_model(source)
    plan = model.plan(96, 64, param="x")
    # Texts before an image come behind it in one of the families.
    for parts in (["a red apple"], [plan, "what is it?"], [plan, plan, " after"]):
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts
        ]
        theirs = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        theirs = theirs.replace(mark, before + pad * plan.rows + after)
        ids = tokenizer(theirs, add_special_tokens=False).input_ids
        content = Content(parts=tuple(parts))
        ours = model.prompt(content, max_tokens=8192, truncate=Truncate.NONE, param="x").tokens
        assert ids == ours.tolist()
    flags = serve_flags(model.family, target)
    assert Path(flags[flags.index("--chat-template") + 1]).read_text() == tokenizer.chat_template


@pytest.mark.parametrize(
    "spec", [BERT, ROBERTA_TINY, NEMOTRON_3_TINY], ids=["bert", "xlm_roberta", "nemotron_3"]
)
def test_plain_texts_become_the_same_tokens(tmp_path: Path, spec: object) -> None:
    from transformers import PreTrainedTokenizerFast

    source, target = tmp_path / "model", tmp_path / "copy"
    write_checkpoint(source, spec)
    assert main([str(source), str(target)]) == 0 and not is_chat(target)
    model = open_model(source)
    content = Content(parts=("What is shown in the picture?",))
    ours = model.prompt(content, max_tokens=99, truncate=Truncate.NONE, param="x").tokens.tolist()
    assert PreTrainedTokenizerFast.from_pretrained(str(target))(content.parts[0]).input_ids == ours
    flags = serve_flags(model.family, target)
    assert flags[flags.index("--max-model-len") + 1] == str(min(10_240, model.max_tokens))
    assert "--chat-template" not in flags


def test_two_towers_stay_as_they_are(tmp_path: Path) -> None:
    source, target = tmp_path / "model", tmp_path / "copy"
    write_checkpoint(source, CLIP_TINY)
    assert main([str(source), str(target)]) == 0 and not is_chat(target)
    model = open_model(target)
    assert model.family == "clip" and "--max-model-len" not in serve_flags(model.family, target)


@pytest.mark.parametrize("spec", [llama_rerank.TINY, VL_RERANK_TINY], ids=["llama", "qwen"])
def test_pairs_become_the_same_tokens(tmp_path: Path, spec: object) -> None:
    from transformers import AutoConfig, PreTrainedTokenizerFast

    source, target = tmp_path / "model", tmp_path / "copy"
    write_checkpoint(source, spec)
    assert main([str(source), str(target)]) == 0
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(target))
    model = open_model(source)
    documents, asked = ["an apple"], [Content(parts=("an apple",))]
    if model.vision is not None:
        plan = model.plan(96, 64, param="x")
        # Where vLLM puts an image that is a document.
        documents.append("<|vision_start|>" + "<|image_pad|>" * plan.rows + "<|vision_end|>")
        asked.append(Content(parts=(plan,)))
    pairs = Pairs(
        query=Content(parts=("what is red?",)),
        documents=asked,
        limits=PairLimits(tokens=8192),
        param="query",
        params=["document"] * len(asked),
    )
    prompts = model.pairs(pairs)
    for document, ours in zip(documents, prompts, strict=True):
        pair = [{"role": "query", "content": "what is red?"}, {"role": "document", "content": document}]
        theirs = tokenizer(tokenizer.apply_chat_template(pair, tokenize=False)).input_ids
        assert isinstance(ours, Prompt)
        assert theirs == ours.tokens.tolist()
    config = AutoConfig.from_pretrained(target)
    assert config.num_labels == 1 or config.classifier_from_token == ["no", "yes"]


def test_the_configuration_of_a_copy_has_both_towers(tmp_path: Path) -> None:
    from benchmarks.vllm_configuration_llama_nemotron_vl import LlamaNemotronVLConfig

    source, target = tmp_path / "model", tmp_path / "copy"
    write_checkpoint(source, TINY)
    main([str(source), str(target)])
    config = LlamaNemotronVLConfig.from_pretrained(target)
    assert config.get_text_config().hidden_size == TINY.hidden
    assert config.get_text_config().pooling == "avg"
    assert config.vision_config.num_hidden_layers == TINY.vision_layers
    assert config.max_dynamic_patch == TINY.max_input_tiles


def test_other_families_are_named(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ValueError, match="qwen3_embedding; vLLM is given"):
        main([str(source), str(tmp_path / "copy")])
