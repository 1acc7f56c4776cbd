"""What others wrote does nothing to a terminal."""

import pytest

from tessera.launch.report import Report
from tessera.terminal import complain, say

NAME = "a\x1b[31m\x9b2J\r<script>é"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_terminal_obeys_the_launcher(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(log_format)
    report.say(f"ready at http://127.0.0.1, model {NAME}")
    report.show(f"one\n{NAME}\n")
    written = capsys.readouterr().err
    assert "<script>é" in written and written.count("\n") == 3
    assert all(character.isprintable() or character == "\n" for character in written)


def test_no_terminal_obeys_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"{NAME}\nnext")
    complain(NAME)
    written = capsys.readouterr()
    assert written.out == "a\ufffd[31m\ufffd2J\ufffd<script>é\nnext\n"
    assert written.err == "a\ufffd[31m\ufffd2J\ufffd<script>é\n"
