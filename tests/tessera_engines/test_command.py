"""``tessera-engine`` opens a checkpoint with the options of those who serve it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tessera.errors import CheckpointError
from tessera.models.base import Model
from tessera_engines.cli import main
from tests.families.grid import make_checkpoint


def refused(capsys: pytest.CaptureFixture[str], checkpoint: Path, *flags: str) -> str:
    out = str(checkpoint.parent / "out of the command")
    with pytest.raises(SystemExit):
        main([*flags, "--model-path", str(checkpoint), "--out", out])
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["build", "--stage", "text", "--flavour", "aoti"], ["export", "--stage", "text"]]
)
def test_the_options_of_the_family_are_given_by_a_flag(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    said = refused(capsys, checkpoint, *command, "--model-options", json.dumps({"max_pixels": 64}))
    assert "llama_nemotron_vl" in said and "max_pixels" in said
    assert "--model-options" in refused(capsys, checkpoint, *command, "--model-options", "[1]")


def test_the_flag_goes_over_the_config_key_by_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tells:
        """A family that gets no further than its options."""

        name = "tells"
        model_types = ("test_grid",)

        def open_model(self, path: Path, options: Mapping[str, object]) -> Model:
            raise CheckpointError(json.dumps(options))

    monkeypatch.setattr("tessera.models.families", lambda: [Tells()])
    config = tmp_path / "engine.yaml"
    config.write_text("model_options: {a: 1, b: 2}\nbuild: [{stage: text, flavour: aoti}]\n")
    command = ["build", "--stage", "text", "--config", str(config), "--model-options", '{"b": 3, "c": 4}']
    said = refused(capsys, make_checkpoint(tmp_path / "model", 0), *command)
    assert json.dumps({"a": 1, "b": 3, "c": 4}) in said
