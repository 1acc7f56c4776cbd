"""Search in Qdrant by FastEmbed's sparse form, made of a service's answers: ``URL MODEL TEXTS``.

Runs in the environment of ``scripts/clients fastembed``. Prints, for each of the texts, its weights by token
id as FastEmbed has them, and the number of the text that Qdrant finds first for it.
"""

from __future__ import annotations

import json
import sys

import numpy as np
from fastembed import SparseEmbedding
from openai import OpenAI
from qdrant_client import QdrantClient, models

url, model, texts = *sys.argv[1:3], json.loads(sys.argv[3])
with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
    rows = client.embeddings.create(
        model=model, input=texts, encoding_format="float", extra_body={"output_types": ["sparse"]}
    ).data
embedded = [
    SparseEmbedding(
        values=np.array(row.sparse_embedding["values"]), indices=np.array(row.sparse_embedding["indices"])
    )
    for row in rows
]
store = QdrantClient(":memory:")
store.create_collection("texts", sparse_vectors_config={"sparse": models.SparseVectorParams()})
points = [
    models.PointStruct(id=number, vector={"sparse": models.SparseVector(**one.as_object())})
    for number, one in enumerate(embedded)
]
store.upsert("texts", points)
found = [
    store.query_points("texts", query=models.SparseVector(**one.as_object()), using="sparse", limit=1)
    for one in embedded
]
print(json.dumps([[one.as_dict(), best.points[0].id] for one, best in zip(embedded, found, strict=True)]))
