"""The compiled engines behind the seams of the torch engines, and what they refuse to load."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import msgspec
import numpy as np
import pytest
import torch

from tessera.engine.batch import PackedInput, pack
from tessera.engine.factory import make_text_engine, make_vision_engine
from tessera.engine.placement import place
from tessera.engine.settings import EngineSettings
from tessera.errors import ConfigError, EngineBuildFailed, EngineMismatch
from tessera.models import open_model
from tessera.models.base import sequential
from tessera.models.llama_nemotron_vl.model import LlamaNemotronVL
from tessera.nn.kernels import exported_products
from tessera_engines.aoti.build import AotiFlavour, calls_gemms, require_shared_library
from tessera_engines.cli import main
from tessera_engines.compiled.manifest import Manifest
from tessera_engines.compiled.spec import BuildSpec, Layout, Profile, Range, Stage
from tessera_tools.random_checkpoint.checkpoint import main as make_checkpoint
from tests.engine.packed_images import of_units, rows_for
from tests.families.dual_encoder import FAMILY

# The first test waits for the compilers.
pytestmark = [pytest.mark.compiles, pytest.mark.timeout(3900), pytest.mark.xdist_group("aoti")]


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> LlamaNemotronVL:
    return LlamaNemotronVL(checkpoint)


def config(engine: str, path: Path | None, **changes: Any) -> EngineSettings:
    values: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_batch_cost": 8, "max_queue_cost": 64}
    return EngineSettings(engine=engine, path=path, **(values | changes))


def test_both_engines_agree_with_torch_in_mixed_company(engines: Path, model: LlamaNemotronVL) -> None:
    images = of_units(model, [1, 3])
    lengths = [1, 7, 300, 8, 2, 90, 64, 63, *([5] * 70)]
    results = []
    for kind in ("torch", "aoti"):
        vision_config, text_config = (config(kind, engines / name) for name in ("vision", "text"))
        vision = make_vision_engine(model, vision_config, place(vision_config))
        text = make_text_engine(model, text_config, place(text_config))
        vision.warm()
        text.warm()
        rows = rows_for(model, images)
        vision.launch(images, rows).result()
        inputs = [
            PackedInput(
                tokens=np.random.default_rng(size).integers(0, 1000, size).astype(np.int32),
                positions=sequential(size),
            )
            for size in lengths
        ]
        for position, image in zip((1, 4), rows, strict=True):
            index = np.arange(3, 3 + len(image), dtype=np.int32)
            tokens = np.full(len(image) + 9, 7, np.int32)
            inputs.insert(
                position,
                PackedInput(
                    tokens=tokens,
                    positions=sequential(len(tokens)),
                    vision=(image,),
                    vision_index=index,
                ),
            )
        found = text.launch(pack(inputs)).result()
        alone = text.launch(pack(inputs[:1])).result()
        np.testing.assert_allclose(alone.values[0], found.values[0], atol=1e-5)
        results.append((torch.cat(rows).numpy(), found))
        assert (vision.depth, text.depth) == (1, 1)
        vision.close()
        text.close()
    (torch_rows, expected), (rows, found) = results
    assert worst_cosine(rows, torch_rows) >= 0.99999
    assert worst_cosine(found.values, expected.values) >= 0.99999
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-4)


_SERVE = """
import os, pip, sys
from pathlib import Path
import torch
from tessera_engines.aoti.package import AotiPackage
from tessera_engines.compiled.spec import Stage
from tessera.engine.placement import Placement
from tessera.models import open_model
model = open_model(Path(sys.argv[1]))
package = AotiPackage(model, Path(sys.argv[2]), Stage.VISION, Placement(device="cpu", dtype="float32"))
program = package.load()
(rows,) = program(torch.zeros(1, *model.vision.unit_shape, dtype=torch.uint8))
assert rows.isfinite().all()
mapped = [line.rstrip() for line in open("/proc/self/maps") if "/aotinductor/model/" in line]
assert mapped and all(line.endswith(" (deleted)") for line in mapped), mapped
(again,) = program(torch.zeros(1, *model.vision.unit_shape, dtype=torch.uint8))
assert again.equal(rows)
os._exit(0)
"""


def test_serving_needs_no_compiler_and_leaves_no_file(
    engines: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """Nor setuptools, which cannot be imported where pip was."""
    subprocess.run(
        [sys.executable, "-W", "error", "-c", _SERVE, str(checkpoint), str(engines / "vision")],
        env=os.environ | {"PATH": "", "TMPDIR": str(tmp_path)},
        check=True,
        timeout=300,
    )
    assert list(tmp_path.iterdir()) == []


def worst_cosine(found: np.ndarray, expected: np.ndarray) -> float:
    a, b = found.astype(np.float64), expected.astype(np.float64)
    return float(((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).min())


def test_the_cost_of_a_padded_batch(engines: Path, model: LlamaNemotronVL) -> None:
    settings = config("aoti", engines / "text")
    cost = make_text_engine(model, settings, place(settings)).cost
    assert cost(3, 30, 10) == 30  # equal lengths: nothing is padded
    assert cost(10, 1009, 1000) == 2018  # one long among nine short: they do not pay for it


def test_an_engine_of_another_checkpoint_is_refused(engines: Path, tmp_path: Path) -> None:
    make_checkpoint(["--out", str(tmp_path / "other"), "--seed", "1"])
    other = open_model(tmp_path / "other")
    settings = config("aoti", engines / "vision")
    with pytest.raises(EngineMismatch) as caught:
        make_vision_engine(other, settings, place(settings))
    assert other.fingerprint in caught.value.message
    assert Manifest.read(engines / "vision").fingerprint in caught.value.message


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"dtype": "bfloat16"}, ["bfloat16", "float32"]),
        ({"max_batch_cost": 64}, ["up to 32 units", "64"]),
        ({"path": None}, ["path", "--stage vision"]),
        ({"quantization": "fp8"}, ["fp8"]),
    ],
    ids=str,
)
def test_a_config_that_does_not_match_is_refused(
    engines: Path, model: LlamaNemotronVL, changes: dict[str, Any], names: list[str]
) -> None:
    settings = msgspec.structs.replace(config("aoti", engines / "vision"), **changes)
    with pytest.raises(ConfigError) as caught:
        make_vision_engine(model, settings, place(settings))
    assert all(name in caught.value.message for name in names), caught.value.message


def test_an_engine_of_another_stage_is_refused(engines: Path, model: LlamaNemotronVL) -> None:
    settings = config("aoti", engines / "text")
    with pytest.raises(EngineMismatch, match="stage is text, wanted is vision"):
        make_vision_engine(model, settings, place(settings))


# For an input of this length no worker would load it.
SHORT = Profile(tokens=Range(1, 256, 9999))


def _version(manifest: dict[str, Any]) -> None:
    manifest["versions"]["torch"] = "2.0.1"


def _products(manifest: dict[str, Any]) -> None:
    manifest["versions"]["quack-kernels"] = "0.0.1"


def _flags(manifest: dict[str, Any]) -> None:
    manifest["notes"]["cpu_flags"] += " avx9000"


def _capability(manifest: dict[str, Any]) -> None:
    manifest["capabilities"] = ["9.0"]


def _hash(manifest: dict[str, Any]) -> None:
    manifest["files"]["engine.pt2"]["blake3"] = "0" * 32


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (_version, ["torch 2.0.1", torch.__version__]),
        (_products, ["quack-kernels 0.0.1", "quack-kernels not installed"]),
        (_flags, ["avx9000"]),
        (_capability, ["9.0", "cpu"]),
        (_hash, ["engine.pt2", "0" * 32]),
    ],
)
def test_an_engine_of_another_machine_is_refused(
    engines: Path,
    model: LlamaNemotronVL,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    names: list[str],
) -> None:
    copy = shutil.copytree(engines / "vision", tmp_path / "vision")
    path = copy / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    settings = config("aoti", copy)
    with pytest.raises(EngineMismatch) as caught:
        make_vision_engine(model, settings, place(settings))
    assert all(name in caught.value.message for name in names), caught.value.message


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"dtype": "float8"}, ConfigError, "float8"),
        ({"capabilities": ("9.9",)}, ConfigError, "9.9"),
        ({"layout": Layout.PACKED}, EngineBuildFailed, "fused attention"),
        ({"stage": Stage.LM, "layout": Layout.PACKED}, ConfigError, "packed"),
        ({"profiles": (SHORT,)}, ConfigError, "up to 9999 tokens, but the longest input is 10240"),
    ],
    ids=str,
)
def test_what_cannot_be_built_says_why(
    model: LlamaNemotronVL, tmp_path: Path, changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    values = {"stage": Stage.TEXT, "flavour": "aoti", "dtype": "float32", "capabilities": ("cpu",)}
    with pytest.raises(error, match=says):
        AotiFlavour().build(
            model, BuildSpec(**(values | changes)), tmp_path, timing_cache=None, progress=lambda _: None
        )


class _Gated(torch.nn.Module):
    def forward(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return exported_products.gated_product(rows, weight)


def test_a_program_that_calls_products_is_known() -> None:
    inputs = (torch.ones(3, 5), torch.ones(8, 5))
    assert calls_gemms(torch.export.export(_Gated(), inputs))
    assert not calls_gemms(torch.export.export(torch.nn.Linear(5, 8), inputs[:1]))


def test_a_program_with_a_library_of_its_own_is_refused(engines: Path, tmp_path: Path) -> None:
    require_shared_library(engines / "text" / "engine.pt2")
    with ZipFile(tmp_path / "engine.pt2", "w") as archive:
        archive.writestr("model/program.so", b"\x7fELF\0libc.so.6\0")
    with pytest.raises(EngineBuildFailed, match=r"libstdc\+\+\.so\.6"):
        require_shared_library(tmp_path / "engine.pt2")


def test_a_family_without_stages_says_so(tmp_path: Path) -> None:
    spec = BuildSpec(stage=Stage.TEXT, flavour="aoti", dtype="float32", capabilities=("cpu",))
    (tmp_path / "config.json").write_text('{"seed": 0}')
    other = FAMILY.open_model(tmp_path, {})
    with pytest.raises(ConfigError, match="offers no stages"):
        AotiFlavour().build(other, spec, tmp_path, timing_cache=None, progress=lambda _: None)


def test_inspect_names_what_is_called_beside_compiled_code(
    engines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["inspect", str(engines / "text")])
    found = json.loads(capsys.readouterr().out)
    called = found["engine"]["operators"]
    layers = called["cpu__scaled_dot_product_flash_attention_for_cpu"]
    # Two products of each layer add to the residual.
    assert layers == 2 and called["cpu_mm_out"] == called["cpu_addmm_out"] == 2 * layers
    assert any(name.endswith(".so") for name in found["engine"]["files"])
