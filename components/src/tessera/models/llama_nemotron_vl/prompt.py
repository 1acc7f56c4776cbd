"""From one input to the backbone's tokens.

The layout, with ``p`` the role's prefix (``"query: "``, ``"passage: "`` or nothing)::

    text            BOS  p + text
    images          BOS  p  (<img> placeholders </img>, " " between two of them)  " " + text

Runs of text between control tokens are tokenised as one string each, because a merge may join the end
of the prefix with the beginning of the text; the space after the last image stays even without text.
There is no end token.
"""

from __future__ import annotations

from collections.abc import Sequence

from tessera.errors import InvalidInput
from tessera.models.assembly import Assembler, Fixed, Run, Segment
from tessera.models.base import Content, ImagePlan, Piece, Prompt, Role, Truncate
from tessera.models.llama_nemotron_vl.config import PromptConfig
from tessera.models.llama_nemotron_vl.tokenizer import TextTokenizer
from tessera.models.prompts import prompt_of_ids, refuse_instruction, texts_of, token_ids


class PromptBuilder:
    """Builds prompts for one checkpoint; thread-safe."""

    def __init__(self, tokenizer: TextTokenizer, config: PromptConfig, *, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._assembler = Assembler(tokenizer.plain, tokenizer.image_context)
        self._prefixes = {
            Role.QUERY: config.query_prefix,
            Role.PASSAGE: config.passage_prefix,
            Role.NONE: "",
        }

    def build(self, content: Content, *, max_tokens: int, truncate: Truncate, param: str) -> Prompt:
        """See ``Model.prompt``. Texts are joined as they are; images stand before them."""
        refuse_instruction(content, param=param)
        ids = token_ids(content, param=param)
        if ids is not None:
            return prompt_of_ids(
                ids,
                vocab_size=self._vocab_size,
                placeholder=self._tokenizer.image_context,
                max_tokens=max_tokens,
                truncate=truncate,
                param=param,
            )
        text, images, prefix = "".join(texts_of(content)), content.images, self._prefixes[content.role]
        if not text and not images:
            raise InvalidInput(f"{param} is empty: it has neither text nor an image", param=param)
        segments = self._with_images(prefix, images, text) if images else self._text_only(prefix, text)
        return self._assembler.prompt(segments, max_tokens=max_tokens, truncate=truncate, param=param)

    def pieces(self, text: str, *, role: Role, param: str) -> list[Piece]:
        """See ``Model.pieces``."""
        return self._assembler.pieces(self._text_only(self._prefixes[role], text), param=param)

    def token_text(self, token: int) -> str:
        return self._tokenizer.plain.text_of(token)

    def _text_only(self, prefix: str, text: str) -> list[Segment]:
        return [self._tokenizer.bos, Run(prefix, text)]

    def _with_images(self, prefix: str, images: Sequence[ImagePlan], text: str) -> list[Segment]:
        """A marker that strips takes the space beside it."""
        tokenizer = self._tokenizer
        before, after = tokenizer.strips_before_image, tokenizer.strips_after_image
        segments: list[Segment] = [tokenizer.bos, Fixed(prefix.rstrip() if before else prefix)]
        for position, image in enumerate(images):
            if position and not before and not after:
                segments.append(Fixed(" "))
            segments += (tokenizer.image_start, image, tokenizer.image_end)
        spaced = f" {text}"
        return [*segments, Run("", spaced.lstrip() if after else spaced)]
