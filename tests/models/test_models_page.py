"""``docs/models.md`` names every family, and its options with their defaults."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from tessera.models import families
from tessera.models.colqwen3.model import Options as ColQwen3Options
from tessera.models.encoder.model import ColbertOptions, PairOptions
from tessera.models.encoder.model import Options as EncoderOptions
from tessera.models.llama_nemotron_embed.model import Options as RerankOptions
from tessera.models.nemotron_3_5_embed.model import Options as Nemotron35Options
from tessera.models.nemotron_3_embed.model import Options as Nemotron3Options
from tessera.models.nemotron_colembed_vl.model import Options as NemotronColEmbedOptions
from tessera.models.qwen3_embedding.model import Options as EmbeddingOptions
from tessera.models.qwen3_rerank.model import Options as Qwen3RerankOptions
from tessera.models.qwen3_vl_embedding.model import Options as VLOptions
from tessera.models.qwen3_vl_rerank.model import Options as VLRerankOptions
from tessera.models.siglip.model import Options as SiglipOptions
from tessera.models.siglip2.model import Options as Siglip2Options
from tessera.models.splade.model import Options as SpladeOptions

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def section(family: str) -> str:
    return PAGE.partition(f"\n## {family}\n")[2].partition("\n## ")[0]


def test_every_family_is_described() -> None:
    for family in families():
        types = ", ".join(f"`{name}`" for name in family.model_types)
        assert f"| `{family.name}` | {types} |" in PAGE
        assert section(family.name)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("bert", EncoderOptions),
        ("bert_colbert", ColbertOptions),
        ("bert_rerank", PairOptions),
        ("colqwen3", ColQwen3Options),
        ("llama_nemotron_rerank", RerankOptions),
        ("nemotron_3_5_embed", Nemotron35Options),
        ("nemotron_3_embed", Nemotron3Options),
        ("nemotron_colembed_vl", NemotronColEmbedOptions),
        ("qwen3_embedding", EmbeddingOptions),
        ("qwen3_rerank", Qwen3RerankOptions),
        ("qwen3_vl_embedding", VLOptions),
        ("qwen3_vl_rerank", VLRerankOptions),
        ("siglip", SiglipOptions),
        ("siglip2", Siglip2Options),
        ("splade", SpladeOptions),
        ("xlm_roberta", EncoderOptions),
        ("xlm_roberta_colbert", ColbertOptions),
        ("xlm_roberta_rerank", PairOptions),
    ],
)
def test_options_and_their_defaults(family: str, options: type[msgspec.Struct]) -> None:
    table = section(family).partition("| option | default | meaning |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) ?\|", table, re.M)
    assert dict(rows) == {field.name: str(field.default) for field in msgspec.structs.fields(options)}
