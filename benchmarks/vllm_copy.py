"""``python -m benchmarks.vllm_copy CHECKPOINT COPY``: a checkpoint as vLLM serves it.

For ``qwen3_vl_embedding``, ``qwen3_vl_rerank``, ``nemotron_colembed_vl``, ``llama_nemotron_vl``,
``llama_nemotron_rerank``, ``nemotron_3_embed``, encoders and two towers. The weights are linked; what vLLM
wants otherwise, in configuration, tokenizer and processor, is written, and a chat template makes the prompts
of Tessera. Clients send texts as ``messages``, too, so that both servers read the same tokens. The prompt of
an encoder or a tower is the text alone: its files stay as they are, and there is no template. ``python -m
benchmarks.peer --vllm`` does all of it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tessera.models import family_of, open_model

_QWEN_TEMPLATE: Final = (
    '{{- "<|im_start|>system\\nRepresent the user\'s input.<|im_end|>\\n<|im_start|>user\\n" -}}'
    "{%- for message in messages -%}{%- if message.content is string -%}{{- message.content -}}"
    '{%- else -%}{%- for part in message.content -%}{%- if part.type == "text" -%}{{- part.text -}}'
    '{%- else -%}{{- "<|vision_start|><|image_pad|><|vision_end|>" -}}{%- endif -%}{%- endfor -%}'
    '{%- endif -%}{%- endfor -%}{{- "<|im_end|>\\n<|im_start|>assistant\\n<|endoftext|>" -}}'
)
# Without a role there is no prefix; a space stands between an image and what follows it.
_LLAMA_TEMPLATE: Final = (
    '{{- "<|begin_of_text|>" -}}{%- for message in messages -%}{%- if message.content is string -%}'
    "{{- message.content -}}{%- else -%}"
    '{%- for part in message.content -%}{%- if part.type != "text" -%}{{- "<image> " -}}{%- endif -%}'
    "{%- endfor -%}"
    '{%- for part in message.content -%}{%- if part.type == "text" -%}{{- part.text -}}{%- endif -%}'
    "{%- endfor -%}{%- endif -%}{%- endfor -%}"
)
# Of a pair; the tokenizer itself puts the first token before it.
_PAIR_TEMPLATE: Final = (
    '{%- for message in messages -%}{%- if message.role == "query" -%}'
    '{{- "question:" + message.content -}}{%- else -%}'
    '{{- " \\n \\n passage:" + message.content -}}{%- endif -%}{%- endfor -%}'
)
# A pair's contents come as text, with each image's placeholder in it.
_QWEN_PAIR_TEMPLATE: Final = (
    '{{- "<|im_start|>system\\nJudge whether the Document meets the requirements based on the Query and the '
    'Instruct provided. Note that the answer can only be \\"yes\\" or \\"no\\".<|im_end|>\\n'
    "<|im_start|>user\\n<Instruct>: Given a search query, retrieve relevant candidates that answer the "
    'query." -}}{%- for message in messages -%}{%- if message.role == "query" -%}'
    '{{- "<Query>:" + message.content -}}{%- else -%}{{- "\\n<Document>:" + message.content -}}'
    '{%- endif -%}{%- endfor -%}{{- "<|im_end|>\\n<|im_start|>assistant\\n" -}}'
)
_LLAMA_CODE: Final = "configuration_llama_nemotron_vl"
_CONTEXT: Final = 10_240
_TEMPLATE_FILE: Final = "chat.jinja"
_PIXELS: Final = {"shortest_edge": 4096, "longest_edge": 1_843_200}
_COMMON: Final = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "processor_class": "Qwen3VLProcessor",
}


def copy(source: Path, target: Path) -> None:
    """Write the copy.

    Raises ``FileExistsError`` where ``target`` is there already, ``ValueError`` for another family.
    """
    family = family_of(source).name
    if family not in _WRITERS:
        raise ValueError(f"{source} is of {family}; vLLM is given {' or '.join(_WRITERS)}")
    target.mkdir(parents=True)
    for path in source.resolve().iterdir():
        if path.suffix == ".safetensors" or path.name.endswith("index.json"):
            (target / path.name).symlink_to(path)
    template = _WRITERS[family](source, target)
    if template is not None:
        (target / _TEMPLATE_FILE).write_text(template)


COMMAND: Final = "vllm.entrypoints.cli.main"
"""The module of vLLM's command."""


def environment(site: Path) -> dict[str, str]:
    """Return what is set for vLLM's packages in ``site``, which ask nobody for anything."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK")
    return {"PYTHONPATH": str(site.resolve()), **dict.fromkeys(names, "1")}


def is_chat(copy: Path) -> bool:
    """Return whether a copy takes texts as conversations alone."""
    return (copy / _TEMPLATE_FILE).exists()


def serve_flags(family: str, copy: Path) -> list[str]:
    """Flags of ``vllm serve`` for a copy: the same work as Tessera's, and no answer kept."""
    flags = ["--runner", "pooling", "--dtype", "bfloat16"]
    if family not in _TOWERS:
        longest = min(_CONTEXT, open_model(copy).max_tokens) if family in _ENCODERS else _CONTEXT
        flags += ["--max-model-len", str(longest)]
    flags += ["--no-enable-prefix-caching", "--max-num-batched-tokens", "16384", "--max-num-seqs", "512"]
    if is_chat(copy):
        flags += ["--chat-template", str(copy / _TEMPLATE_FILE)]
        flags += ["--chat-template-content-format", "openai"]
    if family in (_QWEN, _QWEN_RERANK, _COLEMBED):
        flags += ["--limit-mm-per-prompt", json.dumps({"image": 1, "video": 0})]
    if family == _LLAMA:
        flags += ["--limit-mm-per-prompt", json.dumps({"image": 1}), "--trust-remote-code"]
    return flags


def _write(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values))


def _read(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text())
    return values


def _llama(source: Path, target: Path) -> str:
    """The classes of the configuration come with the checkpoint; vLLM's own model reads it."""
    config = _read(source / "config.json")
    config.pop("tessera_checkpoint", None)
    processor = _read(source / "processor_config.json")
    config["auto_map"] = {"AutoConfig": f"{_LLAMA_CODE}.LlamaNemotronVLConfig"}
    config |= {"min_dynamic_patch": 1, "max_dynamic_patch": processor["max_input_tiles"]}
    config["llm_config"]["pooling"] = config["pooling"]
    _write(target / "config.json", config)
    shutil.copy(Path(__file__).with_name(f"vllm_{_LLAMA_CODE}.py"), target / f"{_LLAMA_CODE}.py")
    for name in ("tokenizer.json", "processor_config.json"):
        shutil.copy(source / name, target / name)
    tokenizer = _read(source / "tokenizer_config.json")
    _write(target / "tokenizer_config.json", {**tokenizer, "chat_template": _LLAMA_TEMPLATE})
    return _LLAMA_TEMPLATE


def _rerank(source: Path, target: Path) -> str:
    """A plain Llama's configuration, whose class makes vLLM attend in both directions."""
    config = _read(source / "config.json")
    for name in ("tessera_checkpoint", "auto_map", "temperature"):
        config.pop(name, None)
    _write(target / "config.json", config | {"model_type": "llama"})
    shutil.copy(source / "tokenizer.json", target / "tokenizer.json")
    tokenizer = _read(source / "tokenizer_config.json")
    _write(target / "tokenizer_config.json", {**tokenizer, "chat_template": _PAIR_TEMPLATE})
    return _PAIR_TEMPLATE


def _nemotron_3(source: Path, target: Path) -> None:
    """A Llama that sees both ways: vLLM's Ministral 3 is causal, and scales queries from 16,384 on alone."""
    _as_it_is(source, target)
    config = _read(target / "config.json")
    config["rope_parameters"].pop("llama_4_scaling_beta")
    # The class of a Llama's configuration refuses 24 heads beside a width of 2,048.
    config |= {"model_type": "mistral", "architectures": ["LlamaBidirectionalModel"]}
    _write(target / "config.json", config)
    tokenizer = _read(target / "tokenizer_config.json") | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (target / "tokenizer_config.json").unlink()
    _write(target / "tokenizer_config.json", tokenizer)


def _as_it_is(source: Path, target: Path) -> None:
    config = _read(source / "config.json")
    config.pop("tessera_checkpoint", None)
    _write(target / "config.json", config)
    for path in source.resolve().iterdir():
        if path.is_dir():
            # A link to it would lead out of the checkpoint, which Tessera refuses.
            shutil.copytree(path, target / path.name)
        elif not (target / path.name).exists():
            (target / path.name).symlink_to(path)


def _qwen(source: Path, target: Path) -> str:
    """The tokenizer appends nothing, because the template writes the last token itself."""
    config = _read(source / "config.json")
    config.pop("tessera_checkpoint", None)
    return _write_qwen(source, target, config, _QWEN_TEMPLATE)


def _qwen_rerank(source: Path, target: Path) -> str:
    """vLLM makes the head of the logits' two rows, whose tokens the configuration names."""
    config = _read(source / "config.json")
    config.pop("tessera_checkpoint", None)
    config |= {"architectures": ["Qwen3VLForSequenceClassification"], "is_original_qwen3_reranker": True}
    return _write_qwen(source, target, config | {"classifier_from_token": ["no", "yes"]}, _QWEN_PAIR_TEMPLATE)


def _colembed(source: Path, target: Path) -> str:
    """Attention both ways. vLLM applies the final norm, which the reference leaves out."""
    config = _read(source / "config.json")
    config.pop("tessera_checkpoint", None)
    config["text_config"]["is_causal"] = False
    template = _read(source / "tokenizer_config.json")["chat_template"]
    size = _read(source / "preprocessor_config.json")["size"]
    return _write_qwen(source, target, config | {"is_causal": False}, template, size)


def _write_qwen(
    source: Path,
    target: Path,
    config: Mapping[str, object],
    template: str,
    size: Mapping[str, int] = _PIXELS,
) -> str:
    """The processor resizes as the reference does, to areas of this ``size``."""

    def write(name: str, values: Mapping[str, object]) -> None:
        _write(target / name, values)

    write("config.json", config)
    tokenizer = _read(source / "tokenizer.json")
    tokenizer["post_processor"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    write("tokenizer.json", tokenizer)
    write(
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 131072,
            "chat_template": template,
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
        },
    )
    write(
        "preprocessor_config.json",
        {**_COMMON, "image_processor_type": "Qwen2VLImageProcessorFast", "size": size},
    )
    video = {"shortest_edge": 4096, "longest_edge": 25_165_824}
    write(
        "video_preprocessor_config.json",
        {
            **_COMMON,
            "video_processor_type": "Qwen3VLVideoProcessor",
            "size": video,
            "fps": 2,
            "min_frames": 4,
            "max_frames": 768,
        },
    )
    return template


_QWEN: Final = "qwen3_vl_embedding"
_QWEN_RERANK: Final = "qwen3_vl_rerank"
_COLEMBED: Final = "nemotron_colembed_vl"
_LLAMA: Final = "llama_nemotron_vl"
_ENCODERS: Final = ("bert", "xlm_roberta")
_TOWERS: Final = ("clip", "siglip")
_WRITERS: Final[dict[str, Callable[[Path, Path], str | None]]] = {
    **dict.fromkeys((*_ENCODERS, *_TOWERS), _as_it_is),
    _QWEN: _qwen,
    _QWEN_RERANK: _qwen_rerank,
    _COLEMBED: _colembed,
    _LLAMA: _llama,
    "llama_nemotron_rerank": _rerank,
    "nemotron_3_embed": _nemotron_3,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.vllm_copy", description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("copy", type=Path)
    options = parser.parse_args(argv)
    copy(options.checkpoint, options.copy)
    return 0


if __name__ == "__main__":
    sys.exit(main())
