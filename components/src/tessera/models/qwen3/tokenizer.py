"""The control tokens of Qwen's vocabulary."""

from __future__ import annotations

from typing import Final

END_OF_TEXT: Final = "<|endoftext|>"
"""The last token of every input, whose state is the vector.

The released tokenizers append it in a post-processor, and tools that skip that step get worse vectors; here
it is part of the prompt, whatever the file says.
"""

TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"
VISION_START: Final = "<|vision_start|>"
VISION_END: Final = "<|vision_end|>"
IMAGE: Final = "<|image_pad|>"
