"""``tessera-engine`` told to end in the middle of its work."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tessera_engines.kinds import ENGINE_CONFIGS

AOTI = ENGINE_CONFIGS / "llama_nemotron_vl/aoti.yaml"
RTX = ENGINE_CONFIGS / "llama_nemotron_vl/tensorrt_rtx.yaml"


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("words", "during", "number"),
    [
        (["build", "--config", str(AOTI), "--stage", "vision"], "compiling", signal.SIGTERM),
        (["build", "--config", str(RTX), "--stage", "text"], "step 1 of", signal.SIGTERM),
        (["build", "--config", str(RTX), "--stage", "text"], "step 1 of", signal.SIGINT),
        (["export", "--triton", "split"], "exporting lm", signal.SIGINT),
    ],
    ids=["aoti", "tensorrt", "tensorrt by Ctrl-C", "export"],
)
def test_nothing_is_left(
    checkpoint: Path, tmp_path: Path, words: list[str], during: str, number: signal.Signals
) -> None:
    if str(RTX) in words and importlib.util.find_spec("tensorrt_rtx_bindings") is None:
        pytest.skip("needs the extra tensorrt-rtx")
    if str(AOTI) in words and shutil.which("g++") is None:
        pytest.skip("needs g++ (Debian package g++)")
    if words[0] == "export" and importlib.util.find_spec("onnxscript") is None:
        pytest.skip("needs the extra export")
    out = tmp_path / "into" / "made"
    command = [sys.executable, "-m", "tessera_engines.cli", *words]
    command += ["--model-path", str(checkpoint), "--out", str(out)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if during in line:
                    break
            assert len(list(out.parent.iterdir())) == 1
            process.send_signal(number)
            said = process.stderr.read()
            assert process.wait(timeout=60) == 128 + number, said
        finally:
            process.kill()
    assert list(out.parent.iterdir()) == []
    assert "Traceback" not in said
