"""``python -m benchmarks.vllm_copy CHECKPOINT COPY``: a Qwen3-VL-Embedding checkpoint as vLLM serves it.

The weights are linked. The tokenizer appends nothing, because the chat template writes the last token itself;
the processor resizes as the reference does, to 4,096 to 1,843,200 pixels. Then, beside a Tessera that serves
CHECKPOINT::

    vllm serve COPY --runner pooling --dtype bfloat16 --max-model-len 10240 --no-enable-prefix-caching \\
        --limit-mm-per-prompt '{"image":1,"video":0}' --max-num-batched-tokens 16384 --max-num-seqs 512 \\
        --api-server-count 6 --chat-template COPY/chat.jinja --chat-template-content-format openai

Clients send texts as ``messages``, too, so that both servers read the same tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

TEMPLATE: Final = (
    '{{- "<|im_start|>system\\nRepresent the user\'s input.<|im_end|>\\n<|im_start|>user\\n" -}}'
    "{%- for message in messages -%}{%- if message.content is string -%}{{- message.content -}}"
    '{%- else -%}{%- for part in message.content -%}{%- if part.type == "text" -%}{{- part.text -}}'
    '{%- else -%}{{- "<|vision_start|><|image_pad|><|vision_end|>" -}}{%- endif -%}{%- endfor -%}'
    '{%- endif -%}{%- endfor -%}{{- "<|im_end|>\\n<|im_start|>assistant\\n<|endoftext|>" -}}'
)
_COMMON: Final = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "processor_class": "Qwen3VLProcessor",
}


def copy(source: Path, target: Path) -> None:
    """Write the copy; raises ``FileExistsError`` where ``target`` is there already."""
    target.mkdir(parents=True)
    for path in source.resolve().iterdir():
        if path.suffix == ".safetensors" or path.name.endswith("index.json"):
            (target / path.name).symlink_to(path)

    def write(name: str, values: Mapping[str, object]) -> None:
        (target / name).write_text(json.dumps(values))

    config = json.loads((source / "config.json").read_text())
    config.pop("tessera_checkpoint", None)
    write("config.json", config)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    write("tokenizer.json", tokenizer)
    (target / "chat.jinja").write_text(TEMPLATE)
    write(
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 131072,
            "chat_template": TEMPLATE,
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
        },
    )
    image = {"shortest_edge": 4096, "longest_edge": 1_843_200}
    write(
        "preprocessor_config.json",
        {**_COMMON, "image_processor_type": "Qwen2VLImageProcessorFast", "size": image},
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.vllm_copy", description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("copy", type=Path)
    options = parser.parse_args(argv)
    copy(options.checkpoint, options.copy)
    return 0


if __name__ == "__main__":
    sys.exit(main())
