"""The stages of the small checkpoint, and a text stage of token vectors, built by the command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest

from tessera_engines.cli import main
from tessera_engines.kinds import ENGINE_CONFIGS
from tessera_tools.random_checkpoint.checkpoint import write_checkpoint
from tessera_tools.random_checkpoint.llama_nemotron_vl import COLEMBED_TINY
from tests.tessera_engines.aoti.exported import leave_uncompiled

CONFIG = ENGINE_CONFIGS / "llama_nemotron_vl" / "aoti.yaml"
COMPILED = ("vision", "text", "lm")
# Of the modules that those have. Each took 11 s of processor time to compile.
PARTS = ("post", "fused", "embed")
# In one process, since each spends 10 CPU seconds before its first stage. Without the garbage collector,
# which took 1 of 8 CPU seconds of a stage; it would have found 20 MB.
_BUILD = """
import gc, json, sys
gc.disable()
import torch._inductor.config as inductor
from tessera_engines.cli import main
for compiler, *words in json.loads(sys.argv[1]):
    inductor.cpp.cxx = (None, compiler)
    main(["build", *words])
"""


@pytest.fixture(scope="session")
def colembed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose text stage gives a vector of each token."""
    path = tmp_path_factory.mktemp("models") / "colembed"
    write_checkpoint(path, replace(COLEMBED_TINY, image_size=64, base_vocab=600))
    return path


@pytest.fixture(scope="session")
def engines(checkpoint: Path, colembed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an engine directory for each of ``COMPILED``, and ``token vectors``."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++ (Debian package g++)")
    out = tmp_path_factory.mktemp("engines")
    # One that would link libstdc++.a, for every second engine.
    static = tmp_path_factory.mktemp("compiler") / "g++"
    static.write_text('#!/bin/sh\nexec g++ -static-libstdc++ "$@"\n')
    static.chmod(0o755)
    wanted: list[tuple[str, Path, str, tuple[str, ...]]] = [(name, checkpoint, name, ()) for name in COMPILED]
    wanted.append(("token vectors", colembed, "text", ("--layout", "packed", "--decomposable")))
    config = ("--config", str(CONFIG))
    commands = [
        (compiler, "--model-path", str(model), *config, "--stage", stage, *words, "--out", str(out / name))
        for (name, model, stage, words), compiler in zip(wanted, cycle(("g++", str(static))))
    ]
    subprocess.run(
        [sys.executable, "-c", _BUILD, json.dumps(commands)],
        env=os.environ
        | {
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor")),
            # What calls the kernels need not be fast, and the compiler here knows this CPU.
            "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0",
            "TORCHINDUCTOR_VEC_ISA_OK": "1",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        },
        check=True,
        timeout=3600,
    )
    return out


@pytest.fixture(scope="session")
def parts(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an engine directory for each of ``PARTS``, whose programs are left as exported."""
    out = tmp_path_factory.mktemp("parts")
    with pytest.MonkeyPatch.context() as patch:
        leave_uncompiled(patch)
        for name in PARTS:
            words = ["--model-path", str(checkpoint), "--config", str(CONFIG), "--stage", name]
            main(["build", *words, "--out", str(out / name)])
    return out
