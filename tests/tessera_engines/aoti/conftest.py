"""Every stage of the small checkpoint, compiled by the command in processes of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tessera_engines.kinds import ENGINE_CONFIGS

ROOT = Path(__file__).parents[3]
CONFIG = ENGINE_CONFIGS / "llama_nemotron_vl" / "aoti.yaml"
# Two builders at a time, of about the same length. The second one's compiler would link libstdc++.a.
LANES = (("vision", "lm", "post"), ("text", "fused", "embed"))

# Without the garbage collector, which took 1 of 8 CPU seconds of a stage; it would have found 20 MB.
_BUILD = """
import gc, sys
gc.disable()
from tessera_engines.cli import main
model, config, out, *stages = sys.argv[1:]
for stage in stages:
    main(["build", "--model-path", model, "--config", config, "--stage", stage, "--out", f"{out}/{stage}"])
"""


@pytest.fixture
def quick_compiler() -> Iterator[None]:
    """What ``engines`` sets for its processes, for a compiler in this one: 15 CPU seconds, not 25."""
    import torch._inductor.config as inductor

    quick = {
        "aot_inductor.compile_wrapper_opt_level": "O0",
        "cpp.vec_isa_ok": True,
        "compile_threads": 1,
    }
    with inductor.patch(quick):
        yield


@pytest.fixture(scope="session")
def engines(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an engine directory for each stage."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++ (Debian package g++)")
    out = tmp_path_factory.mktemp("engines")
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor")),
        # What calls the kernels need not be fast, and the compiler here knows this CPU.
        "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    static = tmp_path_factory.mktemp("compiler") / "g++"
    static.write_text('#!/bin/sh\nexec g++ -static-libstdc++ "$@"\n')
    static.chmod(0o755)
    builders = [
        subprocess.Popen(
            [sys.executable, "-c", _BUILD, str(checkpoint), str(CONFIG), str(out), *stages],
            env=environment | {"CXX": compiler},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for compiler, stages in zip(("g++", str(static)), LANES, strict=True)
    ]
    try:
        said = [builder.communicate(timeout=1500)[0] for builder in builders]
    finally:
        for builder in builders:
            builder.kill()
            builder.wait()
    assert [builder.returncode for builder in builders] == [0, 0], "\n".join(said)
    return out
