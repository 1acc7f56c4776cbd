"""Which engines give results that may stand for one another's."""

from __future__ import annotations

from pathlib import Path

from tessera.engine.factory import rounding
from tessera.engine.settings import EngineSettings
from tessera_engines.compiled.manifest import Manifest, file_entries
from tessera_engines.compiled.spec import Layout, Stage


def config(**settings: object) -> EngineSettings:
    return EngineSettings(max_batch_cost=1, max_queue_cost=1, **settings)  # type: ignore[arg-type]


def built(folder: Path, dtype: str, content: bytes) -> EngineSettings:
    folder.mkdir()
    (folder / "engine.plan").write_bytes(content)
    Manifest(
        stage=Stage.VISION,
        flavour="tensorrt",
        layout=Layout.PADDED,
        dtype=dtype,
        family="f",
        fingerprint="f",
        width=4,
        row_width=4,
        capabilities=("8.9",),
        versions={},
        profiles=(),
        bindings=(),
        files=file_entries(folder),
        build_seconds=1.0,
        built_at="",
    ).write(folder)
    return config(engine="tensorrt", path=folder)


def test_only_what_rounds_further_is_told_apart(tmp_path: Path) -> None:
    exact = [config(), config(engine="aoti"), built(tmp_path / "a", "bfloat16", b"a")]
    assert {rounding(one) for one in exact} == {""}
    coarse = [
        config(quantization="fp8"),
        config(quantization="fp8", unquantized_blocks=2),
        built(tmp_path / "b", "float8", b"calibrated with this"),
        built(tmp_path / "c", "float8", b"calibrated with that"),
    ]
    assert len({rounding(one) for one in coarse} - {""}) == 4
    assert rounding(built(tmp_path / "d", "float8", b"calibrated with this")) == rounding(coarse[2])
