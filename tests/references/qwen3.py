"""What the Qwen3 families compute, from transformers' own modules: one input at a time, without any cache.

Shares no code with Tessera. Text that spells out a special token is parsed here, as the tokenizer's default
is, so inputs for comparisons should not contain any.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from tests.models.running import Given, Pair

END = "<|endoftext|>"
TASK = "Given a web search query, retrieve relevant passages that answer the query"


class Qwen3Reference:
    """Qwen3-Embedding at ``path``, in float32."""

    def __init__(self, path: str | Path) -> None:
        from transformers import Qwen3Config, Qwen3Model

        self.config, self.tokenizer, weights = _files(Path(path))
        self.model = Qwen3Model._from_config(Qwen3Config(**self.config), attn_implementation="sdpa")
        _fill(self.model, {name.removeprefix("model."): value for name, value in weights.items()})
        self.pool: Callable[[torch.Tensor], torch.Tensor] = _last
        self.causal = True

    def tokens(self, text: str, role: str, instruction: str | None = None) -> list[int]:
        if role == "query":
            text = f"Instruct: {instruction or TASK}\nQuery:{text}"
        return _ended(self.tokenizer, text)

    @torch.no_grad()
    def hidden(self, tokens: list[int]) -> torch.Tensor:
        """After the final norm, ``[tokens, hidden]``."""
        mask = None if self.causal else _see_all(len(tokens))
        output = self.model(input_ids=torch.tensor([tokens]), attention_mask=mask, use_cache=False)
        return output.last_hidden_state[0]

    def vector(self, tokens: list[int]) -> np.ndarray:
        return functional.normalize(self.pool(self.hidden(tokens)), dim=0, eps=1e-12).numpy()

    def answer(self, given: Given) -> np.ndarray:
        """The unit vector of an input of texts."""
        return self.vector(self.tokens("".join(map(str, given.parts)), given.role.value, given.instruction))


class Qwen3RerankReference:
    """Qwen3-Reranker at ``path`` in any of its layouts, in float32, as its model card scores pairs."""

    before = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the"
        ' Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    instruction = TASK

    def __init__(self, path: str | Path) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

        self.config, self.tokenizer, weights = _files(Path(path))
        config = Qwen3Config(**self.config, pad_token_id=self.tokenizer.token_to_id(END))
        self.classifies = "score.weight" in weights
        kind = Qwen3ForSequenceClassification if self.classifies else Qwen3ForCausalLM
        if self.classifies:
            config.num_labels = 1
        self.model = kind._from_config(config, attn_implementation="sdpa")
        if not self.classifies:
            weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
        _fill(self.model, weights)
        self.yes, self.no = (self.tokenizer.token_to_id(answer) for answer in ("yes", "no"))
        self.causal = True

    def tokens(self, query: str, document: str, instruction: str | None) -> list[int]:
        body = f"<Instruct>: {instruction or self.instruction}\n<Query>: {query}\n<Document>: {document}"
        return [
            token for part in (self.before, body, self.after) for token in self.tokenizer.encode(part).ids
        ]

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> tuple[float, float]:
        """Those of yes and no."""
        mask = None if self.causal else _see_all(len(tokens))
        hidden = self.model.model(
            input_ids=torch.tensor([tokens]), attention_mask=mask, use_cache=False
        ).last_hidden_state[0, -1]
        if self.classifies:
            return self.model.score(hidden).item(), 0.0
        of_all = self.model.lm_head(hidden)
        return of_all[self.yes].item(), of_all[self.no].item()

    def answer(self, given: Pair) -> np.ndarray:
        """The logarithm of the odds of yes, ``[1]``: what is left of the softmax of two logits."""
        query, document = ("".join(map(str, side.parts)) for side in (given.query, given.document))
        yes, no = self.logits(self.tokens(query, document, given.query.instruction))
        return np.array([yes - no], np.float32)


class Qwen3VLReference:
    """Qwen3-VL-Embedding at ``path``, in float32; images are encoded files.

    ``limits`` are the least and the largest area of an image.
    """

    limits = (4096, 1_843_200)

    def __init__(self, path: str | Path) -> None:
        from transformers import Qwen3VLConfig, Qwen3VLModel
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.config, self.tokenizer, weights = _files(Path(path))
        known = {key: value for key, value in self.config.items() if key != "model_type"}
        self.model = Qwen3VLModel._from_config(Qwen3VLConfig(**known), attn_implementation="sdpa")
        _fill(self.model, self.body(weights))
        half = [0.5, 0.5, 0.5]
        self.processor = Qwen2VLImageProcessorPil(
            do_resize=False,
            patch_size=16,
            temporal_patch_size=2,
            merge_size=2,
            image_mean=half,
            image_std=half,
        )
        self.pool: Callable[[torch.Tensor], torch.Tensor] = _last
        self.causal = True
        self.flat_positions = False

    def body(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights by the names of ``Qwen3VLModel``."""
        return {name.removeprefix("model."): value for name, value in weights.items()}

    def pixels(self, data: bytes) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """Normalised patches, float32 ``[patches, 1536]``, and the grid."""
        image = Image.open(BytesIO(data))
        if image.mode == "RGBA":
            page = Image.new("RGB", image.size, (255, 255, 255))
            page.paste(image, mask=image.split()[3])
            image = page
        image = image.convert("RGB")
        image = image.resize(resized(*image.size, *self.limits))
        made = self.processor(images=[image], return_tensors="pt")
        return made["pixel_values"], tuple(made["image_grid_thw"][0].tolist())

    def tokens(
        self, parts: Sequence[str | tuple[int, int, int]], instruction: str | None = None
    ) -> list[int]:
        """Ids of the prompt; an image is given by its grid."""
        spelled = [
            part
            if isinstance(part, str)
            else "<|vision_start|>" + "<|image_pad|>" * (part[1] * part[2] // 4) + "<|vision_end|>"
            for part in parts
        ]
        return _ended(
            self.tokenizer,
            f"<|im_start|>system\n{instruction or DEFAULT_INSTRUCTION}<|im_end|>\n"
            f"<|im_start|>user\n{''.join(spelled)}<|im_end|>\n<|im_start|>assistant\n",
        )

    @torch.no_grad()
    def vision_rows(self, pixels: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
        """Main row and DeepStack rows side by side, ``[rows, 4 * hidden]``."""
        output = self.model.visual(pixels, grid_thw=torch.tensor([grid]))
        return torch.cat([output.pooler_output, *output.deepstack_features], dim=1)

    def positions(self, tokens: list[int], grids: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """``[3, tokens]``."""
        ids = torch.tensor([tokens])
        kinds = (ids == self.config["image_token_id"]).int()
        found, _ = self.model.get_rope_index(
            ids, mm_token_type_ids=kinds, image_grid_thw=torch.tensor(grids) if grids else None
        )
        return found[:, 0]

    @torch.no_grad()
    def hidden(
        self, tokens: list[int], grids: Sequence[tuple[int, int, int]], rows: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """After the final norm, ``[tokens, hidden]``."""
        ids = torch.tensor([tokens])
        embedded = self.model.language_model.embed_tokens(ids).clone()
        mask = ids == self.config["image_token_id"]
        main, levels = None, None
        if rows:
            width = embedded.shape[-1]
            main, *levels = torch.cat(list(rows)).split(width, dim=1)
            embedded[mask] = main
        positions = self.positions(tokens, grids)
        if self.flat_positions:
            positions = torch.arange(len(tokens)).expand(3, -1)
        output = self.model.language_model(
            inputs_embeds=embedded,
            position_ids=positions[:, None],
            attention_mask=None if self.causal else _see_all(len(tokens)),
            visual_pos_masks=mask if rows else None,
            deepstack_visual_embeds=levels,
            use_cache=False,
        )
        return output.last_hidden_state[0]

    def vector(self, parts: Sequence[str | bytes], instruction: str | None = None) -> np.ndarray:
        """The unit vector of texts and encoded images in their order."""
        images = {place: self.pixels(part) for place, part in enumerate(parts) if isinstance(part, bytes)}
        tokens = self.tokens(
            [images[place][1] if place in images else part for place, part in enumerate(parts)], instruction
        )
        rows = [self.vision_rows(*image) for image in images.values()]
        hidden = self.hidden(tokens, [grid for _, grid in images.values()], rows)
        return functional.normalize(self.pool(hidden), dim=0, eps=1e-12).numpy()

    def answer(self, given: Given) -> np.ndarray:
        """The unit vector of an input of texts and encoded images."""
        return self.vector(given.parts, full_stop(given.instruction))

    @torch.no_grad()
    def whole(self, parts: Sequence[str | bytes]) -> np.ndarray:
        """The same by the one call that transformers offers for all of it."""
        images = {place: self.pixels(part) for place, part in enumerate(parts) if isinstance(part, bytes)}
        ids = torch.tensor(
            [self.tokens([images[place][1] if place in images else part for place, part in enumerate(parts)])]
        )
        seen = {}
        if images:
            seen["pixel_values"] = torch.cat([pixels for pixels, _ in images.values()])
            seen["image_grid_thw"] = torch.tensor([grid for _, grid in images.values()])
        kinds = (ids == self.config["image_token_id"]).int()
        output = self.model(input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **seen)
        return functional.normalize(output.last_hidden_state[0, -1], dim=0, eps=1e-12).numpy()


class ColQwen3Reference(Qwen3VLReference):
    """ColQwen3 at ``path``, in float32: the same body, and a linear layer of torch behind it."""

    limits = (65_536, 1_310_720)
    projection: nn.Linear

    def body(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        ours = {"embedding_proj_layer", "custom_text_proj"}
        head = {name.split(".")[1]: each for name, each in weights.items() if name.split(".")[0] in ours}
        rows, columns = head["weight"].shape
        self.projection = nn.Linear(columns, rows, bias="bias" in head)
        _fill(self.projection, head)
        return {
            name.removeprefix("vlm.").removeprefix("model."): each
            for name, each in weights.items()
            if name.split(".")[0] not in ours
        }

    def prompt(self, parts: Sequence[str | tuple[int, int, int]], role: str) -> list[int]:
        """Ids of the prompt; an image is given by its grid."""
        if all(isinstance(part, str) for part in parts):
            text = "".join(map(str, parts))
            return list(self.tokenizer.encode(f"Query: {text}{END * 10}" if role == "query" else text).ids)
        spelled = "".join(
            part
            if isinstance(part, str)
            else "<|vision_start|>" + "<|image_pad|>" * (part[1] * part[2] // 4) + "<|vision_end|>"
            for part in parts
        )
        if not any(isinstance(part, str) for part in parts):
            spelled += "Describe the image."
        answer = "<|im_start|>assistant\n" if self.config["model_type"] == "ops_colqwen3" else ""
        return list(self.tokenizer.encode(f"<|im_start|>user\n{spelled}<|im_end|>{answer}{END}").ids)

    @torch.no_grad()
    def answer(self, given: Given) -> np.ndarray:
        """A unit vector of each token, float32 ``[tokens, width]``."""
        images = {n: self.pixels(part) for n, part in enumerate(given.parts) if isinstance(part, bytes)}
        parts = [images[n][1] if n in images else str(part) for n, part in enumerate(given.parts)]
        rows = [self.vision_rows(*image) for image in images.values()]
        tokens = self.prompt(parts, given.role.value)
        hidden = self.hidden(tokens, [grid for _, grid in images.values()], rows)
        return functional.normalize(self.projection(hidden), dim=-1, eps=1e-12).numpy()


class Qwen3VLRerankReference(Qwen3VLReference):
    """Qwen3-VL-Reranker at ``path``, in float32, as the published script scores pairs."""

    before = Qwen3RerankReference.before
    after = "<|im_end|>\n<|im_start|>assistant\n"
    instruction = "Given a search query, retrieve relevant candidates that answer the query."
    between = "\n<Document>:"

    def body(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.weights = dict(weights)
        self.score = weights.pop("score.weight", None)
        embeddings = weights["model.language_model.embed_tokens.weight"]
        self.of_tokens = weights.pop("lm_head.weight", embeddings).float()
        self.yes, self.no = (self.tokenizer.token_to_id(answer) for answer in ("yes", "no"))
        return super().body(weights)

    def spelled(self, side: Sequence[str | tuple[int, int, int]]) -> str:
        """Images first, by their grids, then texts."""
        images = [part for part in side if not isinstance(part, str)]
        marked = (
            "<|vision_start|>" + "<|image_pad|>" * (h * w // 4) + "<|vision_end|>" for _, h, w in images
        )
        return "".join(marked) + "".join(part for part in side if isinstance(part, str))

    def pair_tokens(
        self,
        query: Sequence[str | tuple[int, int, int]],
        document: Sequence[str | tuple[int, int, int]],
        instruction: str | None,
    ) -> list[int]:
        body = f"<Instruct>: {instruction or self.instruction}<Query>:{self.spelled(query)}"
        body += f"{self.between}{self.spelled(document)}"
        ids: list[int] = self.tokenizer.encode(self.before + body + self.after).ids
        return ids

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> tuple[float, float]:
        """Those of yes and no, of the last token's state; of a classifier its one, and 0."""
        if self.score is not None:
            return (self.score.float() @ hidden).item(), 0.0
        of_all = self.of_tokens @ hidden
        return of_all[self.yes].item(), of_all[self.no].item()

    def _seen(self, pair: Pair) -> tuple[list[int], list[tuple[torch.Tensor, tuple[int, int, int]]]]:
        pixels = {image: self.pixels(image) for image in pair.images}
        sides = [
            [pixels[part][1] if isinstance(part, bytes) else part for part in side.parts]
            for side in (pair.query, pair.document)
        ]
        tokens = self.pair_tokens(sides[0], sides[1], pair.query.instruction)
        return tokens, [pixels[image] for image in pair.images]

    def answer(self, pair: Pair) -> np.ndarray:  # type: ignore[override]
        """The logarithm of the odds of yes, ``[1]``."""
        tokens, images = self._seen(pair)
        rows = [self.vision_rows(*image) for image in images]
        yes, no = self.logits(self.pool(self.hidden(tokens, [grid for _, grid in images], rows)))
        return np.array([yes - no], np.float32)

    @torch.no_grad()
    def generated(self, pair: Pair) -> np.ndarray:
        """The same by the one call that transformers offers for the whole of a language model."""
        from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

        known = {key: value for key, value in self.config.items() if key != "model_type"}
        model = Qwen3VLForConditionalGeneration._from_config(
            Qwen3VLConfig(**known), attn_implementation="sdpa"
        )
        _fill(model, {"lm_head.weight": self.of_tokens, **self.weights})
        tokens, images = self._seen(pair)
        ids = torch.tensor([tokens])
        seen = {}
        if images:
            seen["pixel_values"] = torch.cat([pixels for pixels, _ in images])
            seen["image_grid_thw"] = torch.tensor([grid for _, grid in images])
        kinds = (ids == self.config["image_token_id"]).int()
        logits = model(input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **seen).logits[0, -1]
        return (logits[self.yes] - logits[self.no]).numpy()[None]


def full_stop(instruction: str | None) -> str | None:
    """For instructions that end in a letter or a full stop."""
    return instruction if instruction is None or instruction.endswith(".") else f"{instruction}."


DEFAULT_INSTRUCTION = "Represent the user's input."


def resized(width: int, height: int, least: int = 4096, most: int = 1_843_200) -> tuple[int, int]:
    """The processor's rule with the published limits; it has none against sides below half a patch."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    high, wide = smart_resize(height, width, 32, least, most)
    return wide, high


def _files(path: Path) -> tuple[dict[str, Any], Tokenizer, dict[str, torch.Tensor]]:
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        weights |= load_file(file)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    return json.loads((path / "config.json").read_text()), tokenizer, weights


def _fill(module: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    module.load_state_dict(weights, strict=True)
    module.float().eval()


def _ended(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids with one end token, whether the tokenizer appends it or not."""
    ids = tokenizer.encode(text).ids
    end = tokenizer.token_to_id(END)
    return ids if ids[-1] == end else [*ids, end]


def _last(hidden: torch.Tensor) -> torch.Tensor:
    return hidden[-1]


def _see_all(length: int) -> torch.Tensor:
    return torch.zeros(1, 1, length, length)
