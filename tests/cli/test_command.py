"""``tessera``: its words, what it says to others, and what it imports before it knows which is meant."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from pathlib import Path

import pytest

from tessera import __version__
from tessera.cli import models
from tessera.cli.__main__ import command_of, main, names
from tessera.launch.settings import LaunchSettings

pytestmark = pytest.mark.starts

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def ran(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tessera.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: tessera COMMAND")
    assert all(f"\n  {name} " in said for name in names())


@pytest.mark.parametrize(
    "words", [["--help"], ["serve", "--help"], ["embed", "--help"], ["models", "--json"]]
)
def test_a_reader_that_has_gone_is_no_error(words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "tessera.cli", *words]
    with os.fdopen(write, "wb") as output:
        ended = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, check=False, timeout=180)
    # argparse passes over such an error itself where its text is longer than a buffer.
    assert ended.stderr == b"" and ended.returncode in (0, 128 + signal.SIGPIPE)


def test_the_version_is_the_projects(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tessera {__version__}\n"
    assert __version__ == PROJECT["version"] == metadata.version(PROJECT["name"])


@pytest.mark.parametrize(("words", "what"), [(["srve"], "no command 'srve'"), ([], "say what to do")])
def test_an_unknown_word_gets_one_line_that_says_what_exists(
    words: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert what in line and ", ".join(names()) in line


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["srve"], ["serve", "--help"]])
def test_help_waits_for_no_library(words: list[str]) -> None:
    program = (
        "import sys\nbefore = set(sys.modules)\nfrom tessera.cli.__main__ import main\n"
        f"main({words!r})\nnew = {{name.partition('.')[0] for name in set(sys.modules) - before}}\n"
        "print(*sorted(new - sys.stdlib_module_names), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    # What lists commands reads the modules that declare them, and these need no library either.
    listed = {"tessera_corpus", "tessera_engines", "tessera_tools"} if words == ["--help"] else set()
    assert set(done.stderr.splitlines()[-1].split()) == {"tessera"} | listed


@pytest.mark.parametrize("name", names())
def test_every_command_says_what_it_takes(name: str) -> None:
    done = ran(name, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: tessera {name}")


@pytest.mark.parametrize("script", PROJECT["scripts"].items(), ids=lambda script: script[0])
def test_every_script_of_the_installation_is_there(script: tuple[str, str]) -> None:
    name, target = script
    module, function = target.split(":")
    assert callable(getattr(importlib.import_module(module), function))
    assert name == "tessera" or command_of(name.removeprefix("tessera-")).module == module


def test_errors_name_the_command_as_it_was_called(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sizing", "--text", "1@10", "--rates", "/nowhere.yaml"]) == 1
    assert capsys.readouterr().err == "tessera sizing: /nowhere.yaml: No such file or directory\n"
    done = ran("engine", "inspect", "/nowhere")
    assert (done.returncode, done.stderr.partition(":")[0]) == (1, "tessera engine")


def test_models_of_this_installation(capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    shared = (
        "nvidia/llama-nemotron-embed-vl-1b-v2: family llama_nemotron_vl, model_type llama_nemotron_vl, "
        "architectures LlamaNemotronVLModel"
    )
    assert shared in lines and len(lines) > 8
    assert models.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # Each begins with what can be typed after tessera serve, or with a family that has no published model.
    names = {line.partition(":")[0] for line in lines}
    unpublished = {each["family"] for each in found if not each["models"]}
    assert len(unpublished) < 3 and unpublished < names
    for name in names - unpublished:
        assert LaunchSettings.read({"TESSERA_MODEL_PATH": name}).hub_model == name
    (qwen,) = (each for each in found if each["family"] == "qwen3_embedding")
    assert qwen["model_type"] == ["qwen3"] and "Qwen/Qwen3-Embedding-0.6B" in qwen["models"]


@contextmanager
def answering(status: int, body: bytes) -> Iterator[tuple[str, list[str | None]]]:
    """The URL of a server with one answer, and the keys that it was sent."""
    keys = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers.get("Authorization"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", keys
        finally:
            server.shutdown()
            thread.join()


def test_models_of_a_service(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    card = {"id": "one", "object": "model", "created": 1, "owned_by": "tessera", "images": True, "width": 8}
    monkeypatch.setenv("TESSERA_API_KEY", "sk-0123456789")
    with answering(200, json.dumps({"object": "list", "data": [card]}).encode()) as (url, keys):
        assert models.main(["--url", f"{url}/"]) == 0
    assert capsys.readouterr().out == "one: images true, width 8\n"
    assert keys == ["Bearer sk-0123456789"]


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [(401, b"", "TESSERA_API_KEY"), (500, b"", "answered 500"), (200, b"hello", "as Tessera does")],
)
def test_a_service_that_lists_no_models(
    status: int, body: bytes, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(status, body) as (url, _):
        assert models.main(["--url", url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert url in line and said in line


def test_no_service_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main(["--url", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("tessera models: no answer from http://127.0.0.1:1: ")


_INTERRUPTED = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Interrupting(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, {before})
sys.meta_path.insert(0, Interrupting())
from tessera.__main__ import main
sys.argv = ["tessera", "models", "--json"]
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["tessera.cli.__main__", "tessera.cli.models"])
def test_ctrl_c_while_a_command_is_imported_shows_no_traceback(module: str) -> None:
    program = _INTERRUPTED.format(module=module, before="signal.default_int_handler")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
    # As nohup has it: it is not for this process.
    program = _INTERRUPTED.format(module=module, before="signal.SIG_IGN")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and json.loads(done.stdout)


def test_ctrl_c_ends_a_command_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "main", interrupted)
    assert main(["models"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "tessera: stopped\n"
