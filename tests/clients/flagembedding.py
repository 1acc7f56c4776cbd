"""The three outputs of a bge-m3 by FlagEmbedding, as JSON.

Runs with the packages of ``scripts/clients flagembedding`` beside those of the tests.
"""

from __future__ import annotations

import json
import sys

from FlagEmbedding import BGEM3FlagModel


def main(path: str, texts: list[str]) -> None:
    """Print the outputs of each text under FlagEmbedding's names, the ids of weights as it writes them."""
    model = BGEM3FlagModel(path, use_fp16=False, devices="cpu")
    found = model.encode(texts, return_dense=True, return_sparse=True, return_colbert_vecs=True, batch_size=2)
    print(
        json.dumps(
            {
                "dense_vecs": found["dense_vecs"].tolist(),
                "lexical_weights": [
                    {token: float(weight) for token, weight in weights.items()}
                    for weights in found["lexical_weights"]
                ],
                "colbert_vecs": [vectors.tolist() for vectors in found["colbert_vecs"]],
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
