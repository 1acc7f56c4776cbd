"""32 requests of 128 texts at once by nemo-retriever's own client: how many vectors came, and of which width.

Runs in the environment of ``scripts/clients retriever``, with the endpoint and the model's name.
"""

from __future__ import annotations

import json
import sys

from nemo_retriever.models.inference.main_text_embed import _async_runner


def main(endpoint: str, model: str) -> None:
    batches = [[f"text {number} of batch {batch}" for number in range(128)] for batch in range(32)]
    found = _async_runner(
        batches,
        api_key=None,
        embedding_nim_endpoint=endpoint,
        embedding_model=model,
        embedding_model_provider_prefix=None,
        encoding_format="float",
        input_type="passage",
        truncate="END",
        filter_errors=False,
        modalities=[["text"] * 128] * 32,
        max_concurrent=32,
    )
    widths = sorted({len(vector) if vector else 0 for vector in found["embeddings"]})
    said = [message for message in found["info_msgs"] if message]
    print(f"\n{json.dumps({'vectors': len(found['embeddings']), 'widths': widths, 'said': said})}")


if __name__ == "__main__":
    main(*sys.argv[1:])
