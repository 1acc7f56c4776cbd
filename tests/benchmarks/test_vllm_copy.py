"""The copy for vLLM reads a conversation as the service reads the same input."""

from __future__ import annotations

from pathlib import Path

from benchmarks.vllm_copy import main
from transformers import PreTrainedTokenizerFast

from tessera.models import open_model
from tessera.models.base import Content, Truncate
from tessera.tools.random_checkpoint.checkpoint import write_checkpoint
from tessera.tools.random_checkpoint.qwen3 import VL_TINY


def test_conversations_become_the_same_tokens(tmp_path: Path) -> None:
    source, target = tmp_path / "model", tmp_path / "copy"
    write_checkpoint(source, VL_TINY)
    assert main([str(source), str(target)]) == 0
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(target))
    model = open_model(source)
    plan = model.plan(96, 64, param="x")
    for parts in (["a red apple"], [plan, "what is it?"], ["before ", plan, " after"]):
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts
        ]
        theirs = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        ids = tokenizer(theirs, add_special_tokens=False).input_ids
        ours = model.prompt(
            Content(parts=tuple(parts)), max_tokens=8192, truncate=Truncate.NONE, param="x"
        ).tokens.tolist()
        pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        at = ids.index(pad) if pad in ids else len(ids)
        assert ids[:at] + [pad] * plan.rows * (pad in ids) + ids[at + 1 :] == ours
