"""``tessera serve``: flags over the file over the environment, and what goes to which process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.cli import serve
from tessera.cli.serve import Asked, UnknownWord, changed, is_split, read, wanted
from tessera.frontend.settings import parse as parse_frontend
from tessera.launch.settings import LaunchSettings, SettingError, settings
from tessera.launch.variables import encode_flags
from tessera.worker.settings import parse as parse_worker
from tests.e2e.service import free_ports


def asked(folder: Path, text: str, *words: str) -> Asked:
    """A command line with a file of that text."""
    path = folder / "serve.yaml"
    path.write_text(text)
    return read(["--config", str(path), *words])


def of(found: Asked, environment: dict[str, str] | None = None) -> LaunchSettings:
    return LaunchSettings.read(environment or {}, found.given)


def test_nothing_is_the_demonstration_model_with_both_stages() -> None:
    found = of(read([]))
    assert found == LaunchSettings() and not is_split(found)
    assert found.model_name == "tessera-demo" and (Path(found.model_path) / "config.json").is_file()


def test_a_flag_wins_over_the_file_and_the_file_over_the_environment(tmp_path: Path) -> None:
    environment = {"TESSERA_PORT": "1", "TESSERA_SYSTEM_PORT_BASE": "2", "TESSERA_FRONTENDS": "3"}
    found = of(asked(tmp_path, "port: 10\nsystem_port_base: 20\n", "--port", "100"), environment)
    assert (found.dyn_http_port, found.dyn_system_port_base, found.frontends) == (100, 20, 3)
    assert found.named("dyn_http_port") == "--port 100"
    assert found.named("dyn_system_port_base") == f"{tmp_path}/serve.yaml: system-port-base: 20"
    assert found.named("frontends") == "TESSERA_FRONTENDS=3"
    assert found.named("dyn_http_host") == "--host 127.0.0.1"


def test_every_setting_with_a_flag_is_a_flag_and_a_key(tmp_path: Path) -> None:
    for each in settings():
        flag = each.setting.flag
        if not flag:
            continue
        text = "7" if each.kind in (int, float) else (*each.choices, "seven")[0]
        if text == each.default:
            text = each.choices[1]
        by_flag = of(read([flag, text]))
        by_key = of(asked(tmp_path, f"{flag.removeprefix('--').replace('-', '_')}: '{text}'"))
        by_variable = LaunchSettings.read({each.name.upper(): text})
        assert by_flag == by_key == by_variable != LaunchSettings(), flag


def test_the_model_is_the_one_word_without_a_flag() -> None:
    found = of(read(["/models/one", "--port", "3", "--revision", "v2"]))
    assert (found.model_path, found.model_revision, found.model_name) == ("/models/one", "v2", "one")
    assert found.named("model_path") == "/models/one"
    # Behind a flag that only frontends know as well, and with its value.
    assert of(read(["--max-inputs", "3", "/models/one"])).model_path == "/models/one"
    with pytest.raises(UnknownWord, match="/models/one and --model-path /models/two"):
        read(["/models/one", "--model-path", "/models/two"])


def test_several_names_of_a_model_leave_no_doubt_what_is_served(tmp_path: Path) -> None:
    for words in (["m", "--served-model-name", "a", "b"], ["--served-model-name=a,b", "m"]):
        found = of(read(words))
        assert (found.model_path, found.model_names) == ("m", ["a", "b"])
    with pytest.raises(UnknownWord, match="write MODEL before it, or a comma between names"):
        read(["--served-model-name", "a", "m"])
    assert of(read(["--served-model-name", "a,b"])).model_names == ["a", "b"]
    assert of(asked(tmp_path, "served_model_name: [a, b]\n")).model_names == ["a", "b"]


TWO = """
agg_workers: 2
model_options: {max_pixels: 8192}
drain_seconds: 5
models:
  - model: /models/one
    served_model_name: [first, eins]
    multimodal_embedding_cache_capacity_gb: 3
  - model_path: org/two
    revision: v2
    encode-workers: 1
    embed_workers: 0
    override_engine_args: {threads: 1}
    namespace: elsewhere
  - three
"""


def test_several_models_have_the_settings_of_all_with_their_own_over_them(tmp_path: Path) -> None:
    found = asked(tmp_path, TWO, "--port", "3")
    given, several, models = wanted(found)
    assert several and (given.dyn_http_port, given.dyn_namespace) == (3, "tessera")
    one, two, three = models
    assert [model.settings.model_names for model in models] == [["first", "eins"], ["org/two"], ["three"]]
    assert [model.settings.dyn_namespace for model in models] == [
        *("tessera-first", "elsewhere"),
        "tessera-three",
    ]
    assert [model.split for model in models] == [False, True, False]
    assert (one.settings.agg_workers, three.settings.agg_workers) == (2, 2)
    assert (two.settings.encode_workers, two.settings.embed_workers) == (1, 0)
    assert {model.settings.model_options for model in models} == {'{"max_pixels": 8192}'}
    assert two.settings.model_revision == "v2" and not one.settings.model_revision
    assert one.said == f"{tmp_path}/serve.yaml: models[0]"
    assert one.settings.named("model_path") == f"{tmp_path}/serve.yaml: models[0]: model-path: /models/one"
    drained, cached, threads = (
        parse_worker([*each.worker, "--model-path", "m"]) for each in (three, one, two)
    )
    assert drained.drain_seconds == cached.drain_seconds == threads.drain_seconds == 5
    assert (drained.cache_bytes, cached.cache_bytes) == (None, 3 << 30)
    assert (threads.stages.threads, drained.stages.threads) == (1, 0)


def test_several_words_are_several_models() -> None:
    _, several, models = wanted(read(["/models/one", "--agg-workers", "3", "org/two@v1", "--port", "3"]))
    assert several and [model.settings.model_path for model in models] == ["/models/one", "org/two@v1"]
    assert {model.settings.agg_workers for model in models} == {3}
    assert not wanted(read(["/models/one"]))[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["one", "two", "--model-path", "three"], "one and --model-path three: name models without a flag"),
        (["one", "two", "--served-model-name=a"], "--served-model-name a: is of one model"),
        (["--models", "file"], "there is no flag --models"),
    ],
)
def test_words_that_would_be_of_one_of_several_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(UnknownWord, match=said):
        read(words)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{model: a, port: 3}", r"models\[0\]: port: is of the whole service: write it beside models"),
        ("{model: a, max_inputs: 3}", r"models\[0\]: max-inputs: is of the whole service"),
        (
            "{model: a, agg_worker: 3}",
            r"models\[0\]: there is no setting agg-worker, did you mean agg-workers",
        ),
        ("{model: a, drain_seconds: -1}", r"models\[0\]: drain-seconds: must be 0 or more, not -1$"),
        ("{agg_workers: 3}", r"models\[0\]: model: names no model"),
        ("3", r"models\[0\]: must be a model with its settings, not a int"),
        ("{model: a, agg_workers: x}", r"models\[0\]: agg-workers: x: is not a whole number"),
        (
            "{model: a, agg_workers: 1, embed_workers: 1}",
            r"models\[0\]: .*agg-workers: 1 and .*embed-workers: 1",
        ),
        (
            "{model: a}, {model: b, served_model_name: A}",
            r"models\[1\]: 'A' is the name of .*models\[0\] already",
        ),
        ("", "models: must be a list of models"),
    ],
)
def test_what_is_wrong_with_a_model_is_named_with_its_place(tmp_path: Path, entry: str, said: str) -> None:
    with pytest.raises(SettingError, match=f"^{tmp_path}/serve.yaml: {said}"):
        wanted(asked(tmp_path, f"models: [{entry}]"))


def test_what_changed_beside_the_models_is_named(tmp_path: Path) -> None:
    before = asked(tmp_path, TWO)
    assert changed(before, asked(tmp_path, TWO.replace("eins", "uno"))) == []
    now = asked(tmp_path, TWO.replace("agg_workers: 2", "port: 3").replace("seconds: 5", "seconds: 6"))
    assert changed(before, now) == [
        f"{tmp_path}/serve.yaml: agg-workers: 2",
        f"{tmp_path}/serve.yaml: port: 3",
        "--drain-seconds=6",
    ]
    assert changed(before, asked(tmp_path, TWO.partition("models")[0]))[-1:] == [
        f"{tmp_path}/serve.yaml: models"
    ]


def test_a_file_of_keys_that_holds_others_is_named(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    for words in ([f"--api-keys-file={keys}"], ["--api-keys-file", str(keys)]):
        keys.write_text("first-key-of-all alice\n")
        before = asked(tmp_path, TWO, *words)
        assert changed(before, asked(tmp_path, TWO, *words)) == []
        keys.write_text("first-key-of-all alice\nsecond-key-of-all bob\n")
        assert changed(before, asked(tmp_path, TWO, *words)) == [f"what --api-keys-file {keys} holds"]
        keys.unlink()
        assert changed(before, asked(tmp_path, TWO, *words)) == [f"what --api-keys-file {keys} holds"]


def test_values_of_yaml_are_what_a_variable_would_hold(tmp_path: Path) -> None:
    text = """
model_options: {max_pixels: 8192}
agg-cuda-visible-devices: [0, 1]
frontend_page: off
cuda_mps: on
served_model_name: null
"""
    found = of(asked(tmp_path, text))
    assert json.loads(found.model_options) == {"max_pixels": 8192}
    assert (found.agg_cuda_visible_devices, found.frontend_page, found.cuda_mps) == ("0,1", "off", "on")
    assert found.served_model_name == ""


def test_flags_of_processes_go_to_those_that_know_them(tmp_path: Path) -> None:
    text = """
max_inputs: 5
allowed_media_domains: [a.example, b.example]
override_engine_args: {text: {max_batch_cost: 64}}
open_metrics: true
allow_private_media: false
page: false
"""
    words = ("--max-inputs=7", "--drain-seconds", "3", "--dynamo-model", "--media-proxy", "http://proxy:1")
    found = asked(tmp_path, text, *words)
    frontend = parse_frontend([*found.frontend, "--model-path", "m"])
    worker = parse_worker([*found.worker, "--model-path", "m"])
    assert frontend.limits.request.inputs == 7
    assert frontend.media.allowed_domains == frozenset({"a.example", "b.example"})
    assert (frontend.access.open_metrics, frontend.media.allow_private, frontend.page) == (True, False, False)
    assert frontend.media.proxy == "http://proxy:1"
    assert frontend.drain_seconds == worker.drain_seconds == 3
    assert worker.stages.text.max_batch_cost == 64 and worker.dynamo_model
    # An encode worker serves no model of Dynamo's.
    encode = parse_worker(
        [*encode_flags(found.worker), "--model-path", "m", "--disaggregation-mode", "encode"]
    )
    assert encode.drain_seconds == 3 and not encode.dynamo_model


def test_variables_of_processes_are_under_the_file_and_that_under_flags(tmp_path: Path) -> None:
    environment = {
        "TESSERA_MAX_INPUTS": "5",
        "TESSERA_MAX_IMAGES": "6",
        "TESSERA_DRAIN_SECONDS": "7",
        "TESSERA_PAGE": "off",
        "TESSERA_OPEN_METRICS": "on",
        "TESSERA_ALLOW_PRIVATE_MEDIA": "no",
        "TESSERA_ALLOWED_MEDIA_DOMAINS": "a.example, b.example",
        "TESSERA_DYNAMO_MODEL": "1",
    }
    path = tmp_path / "serve.yaml"
    path.write_text("max_images: 60\ndrain_seconds: 70\n")
    found = read(["--config", str(path), "--drain-seconds", "700"], environment=environment)
    frontend = parse_frontend([*found.frontend, "--model-path", "m"])
    worker = parse_worker([*found.worker, "--model-path", "m"])
    assert (frontend.limits.request.inputs, frontend.limits.request.images) == (5, 60)
    assert frontend.drain_seconds == worker.drain_seconds == 700
    assert (frontend.page, frontend.access.open_metrics, frontend.media.allow_private) == (False, True, False)
    assert frontend.media.allowed_domains == frozenset({"a.example", "b.example"})
    assert worker.dynamo_model and "--dynamo-model" not in encode_flags(found.worker)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"TESSERA_MAX_INPUTS": "x"}, "^TESSERA_MAX_INPUTS=x: invalid int value: 'x'$"),
        ({"TESSERA_MAX_INPUTS": "0"}, "^TESSERA_MAX_INPUTS=0: must be positive, not 0$"),
        ({"TESSERA_PAGE": "perhaps"}, "^TESSERA_PAGE=perhaps: expected on or off$"),
    ],
)
def test_what_a_variable_says_wrongly_is_named_with_it(environment: dict[str, str], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        read([], environment=environment)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--colour", "blue"], "there is no flag --colour$"),
        (["--max-input", "3"], r"there is no flag --max-input, did you mean --max-inputs\?$"),
        (["--frontend", "3"], r"no flag --frontend, did you mean --frontends\?$"),
        (["--max-inputs", "x"], "--max-inputs: invalid int value: 'x'"),
        (["--max-inputs", "0"], "--max-inputs must be positive, not 0"),
        (["--confg", "x"], r"no flag --confg, did you mean --config\?$"),
        (["--modality"], "--modality: expected one argument"),
        (["--config"], "--config: expected one argument"),
        (["--disaggregation-mode", "both"], "invalid choice: 'both'"),
    ],
)
def test_words_that_nobody_knows_are_named(words: list[str], said: str) -> None:
    with pytest.raises(UnknownWord, match=said):
        read(words)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fronts: 3", r"there is no setting fronts, did you mean frontends\?$"),
        ("venv: .venv", "there is no setting venv"),
        ("modells: [a]", r"there is no setting modells, did you mean models\?$"),
        ("max_body_mb: 64MB", "max-body-mb: invalid float value: '64MB'$"),
        ("max_inputs: 0", "max-inputs: must be positive, not 0$"),
        ("- port", "not a list"),
        ("port: {", "not valid YAML"),
        ("port: \x00", "not valid YAML"),
    ],
)
def test_what_is_wrong_in_the_file_is_named_with_it(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingError, match=f"^{tmp_path}/serve.yaml: .*{said}"):
        asked(tmp_path, text)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"nowhere\.yaml: No such file"):
        read(["--config", str(tmp_path / "nowhere.yaml")])


@pytest.mark.starts
@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (
            ["--colour"],
            2,
            "tessera serve: there is no flag --colour; tessera serve --help lists what there is\n",
        ),
        (["--frontends", "two"], 1, "tessera: --frontends two: is not a whole number\n"),
        (["/nowhere/model"], 1, "tessera: /nowhere/model: no such directory; a model of a hub is ORG/NAME\n"),
        (["--agg-workers", "1", "--embed-workers", "1"], 1, "--agg-workers 1 and --embed-workers 1"),
        (["--log-format", "json", "--port", "x"], 1, '"level":"ERROR"'),
        (["--system-port-base", "40000"], 1, "tessera: --system-port-base 40000: Dynamo takes ports"),
        (["--port", "99999"], 1, "tessera: --port 99999: must be 0 to 65535, not 99999\n"),
        (["--ready-timeout-seconds", "-1"], 1, "tessera: --ready-timeout-seconds -1: must be positive"),
        (["--tls-cert", "nothere"], 1, "tessera: --tls-cert nothere: No such file or directory\n"),
        (["--api-keys-file", "nix"], 1, "tessera: --api-keys-file nix: No such file or directory\n"),
        (["--max-file-size-mb", "lots"], 1, "argument --max-file-size-mb: invalid float value: 'lots'\n"),
        (["--dimensions-allowed", "wide"], 1, "tessera: --dimensions-allowed: wide is neither a width"),
        (["--engine-args", "nothere.yaml"], 1, "tessera: nothere.yaml: No such file or directory\n"),
        (
            ["--override-engine-args", '{"text": {"max_batch_cst": 1}}'],
            1,
            "unknown field `max_batch_cst` - at `$.text`, did you mean max_batch_cost?\n",
        ),
    ],
)
@pytest.mark.usefixtures("forks")
def test_what_cannot_start_says_why_in_one_line(words: list[str], status: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tessera.cli", "serve", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    (line,) = done.stderr.splitlines(keepends=True)
    assert said in line


@pytest.mark.starts
@pytest.mark.parametrize(
    ("before", "words", "said"),
    [
        ("ulimit -n 64", [], "tessera: ulimit -n 64: a process needs 256 descriptors at least\n"),
        (
            "export TMPDIR=/nowhere",
            [],
            r"tessera: /nowhere/tessera-run\.\w+: No such file or directory; TMPDIR names another place\n",
        ),
        ("true", ["--host", "nobody.invalid"], "tessera: --host nobody.invalid: .*[Nn]ame.*\n"),
    ],
)
def test_what_the_machine_lacks_is_said_with_the_way_out(before: str, words: list[str], said: str) -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "tessera.cli", "serve", "--port", str(port), *words]
    done = subprocess.run(
        ["bash", "-c", f'{before}; exec "$@"', "-", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert re.fullmatch(f"(tessera: this host: .*\n)?{said}", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tls_cert: nothere", "serve.yaml: tls-cert: nothere: No such file or directory"),
        ("port: 99999", "serve.yaml: port: 99999: must be 0 to 65535, not 99999"),
        ("max_file_size_mb: lots", "serve.yaml: max-file-size-mb: lots: invalid float value: 'lots'"),
        ("api_keys_file: nix", "serve.yaml: api-keys-file: nix: No such file or directory"),
    ],
)
@pytest.mark.usefixtures("forks")
def test_what_cannot_start_for_the_file_names_it_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    command = [sys.executable, "-m", "tessera.cli", "serve", "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"tessera: {tmp_path}/{said}\n")


def test_a_number_of_either_stage_splits_them() -> None:
    assert is_split(of(read(["--encode-workers", "2"])))
    assert is_split(of(read([]), {"TESSERA_EMBED_WORKERS": "0"}))
    assert not is_split(of(read(["--agg-workers", "2"])))


def test_help_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(each.setting.flag in said for each in settings())
    assert "--max-inputs" not in said and "`" not in said.partition("arguments:")[2]
    assert serve.main(["--help-all"]) == 0
    assert "--max-inputs" in (everything := capsys.readouterr().out)
    assert everything.count("--model-path MODEL") == 1
