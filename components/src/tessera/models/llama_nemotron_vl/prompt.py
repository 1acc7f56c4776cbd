"""From one input to the backbone's tokens.

The layout, with ``p`` the role's prefix (``"query: "``, ``"passage: "`` or nothing)::

    text            BOS  p + text
    images          BOS  p  (<img> placeholders </img>, " " between two of them)  " " + text

Runs of text between control tokens are tokenised as one string each, because a merge may join the end
of the prefix with the beginning of the text; the space after the last image stays even without text.
There is no end token.
"""

from __future__ import annotations

from tessera.models.base import Content
from tessera.models.llama.prompt import text_segments
from tessera.models.llama_nemotron_vl.tokenizer import TextTokenizer
from tessera.models.prompts import Fixed, Run, Segment, texts_of


def segments(content: Content, prefix: str, tokenizer: TextTokenizer) -> list[Segment]:
    """Texts are joined as they are; images stand before them.

    A marker that strips takes the space beside it.
    """
    if not content.images:
        return text_segments(tokenizer.bos, prefix, content)
    before, after = tokenizer.strips_before_image, tokenizer.strips_after_image
    made: list[Segment] = [tokenizer.bos, Fixed(prefix.rstrip() if before else prefix)]
    for position, image in enumerate(content.images):
        if position and not before and not after:
            made.append(Fixed(" "))
        made += (tokenizer.image_start, image, tokenizer.image_end)
    spaced = " " + "".join(texts_of(content))
    return [*made, Run("", spaced.lstrip() if after else spaced)]
