"""A whole service on this machine: checked, started, waited for, kept running, and ended."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import sys
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from tessera.launch import mps
from tessera.launch.children import Child, Signals, Told
from tessera.launch.folders import Folders
from tessera.launch.listener import has_address, in_use, listens
from tessera.launch.models import Deployed, WantedModel, document, free_slot
from tessera.launch.port import Port
from tessera.launch.processes import (
    PORTS_OF_ONE,
    Process,
    Workers,
    frontend_processes,
    model_flags,
    share_flags,
    without,
    worker_processes,
)
from tessera.launch.reload import reload
from tessera.launch.report import Report
from tessera.launch.settings import LaunchSettings, SettingError
from tessera.launch.split import described, most_on_a_card, on_cards, placed, settled, sharing, with_frontends
from tessera.launch.supervisor import Supervisor
from tessera.machine import free_memory_bytes, this_machine
from tessera.terminal import place_of, reason_of

if TYPE_CHECKING:
    from tessera.launch.ready import Expected

Answer = TypeVar("Answer")
Steps = Generator[None, None, Answer]
"""What is done while children are looked after: each step ends where something has to be waited for."""

# Dynamo's.
_HIGHEST_SYSTEM_PORT: Final = 32767

_STEP_SECONDS: Final = 0.1

# Frontends map files of counters, 0.3 MB each: a system without room for them kills the process.
_LEAST_FREE_BYTES: Final = 8 << 20

# Each process has some 50 open before its first request, and a frontend half of the others for connections.
_LEAST_DESCRIPTORS: Final = 256


def status_of(run: Callable[[], None], report: Report) -> int:
    """The status with which the launcher ends: of the signal that told it to, 1 for what it complains of."""
    try:
        run()
    except (SettingError, NotReady) as error:
        report.complain(str(error))
        return 1
    except OSError as error:
        report.complain(reason_of(error))
        return 1
    except Told as told:
        report.say("stopped")
        return told.status
    return 0


class NotReady(Exception):
    """A process ended before the service was ready, or time was up."""


class Service:
    """The processes of a service of one model, or of ``several``.

    ``given`` are its settings, and each of ``wanted`` has them with its own over them. ``python`` is the
    interpreter of every process, and ``environment`` their environment. ``reread`` says what models are
    wanted now, and which other settings have changed: it is asked when SIGHUP comes, and raises
    ``SettingError``. What cannot be used is a ``SettingError``, too.
    """

    def __init__(
        self,
        given: LaunchSettings,
        wanted: Sequence[WantedModel],
        *,
        several: bool = False,
        python: str,
        environment: Mapping[str, str],
        signals: Signals,
        report: Report,
        reread: Callable[[], tuple[Sequence[WantedModel], Sequence[str]]] | None = None,
    ) -> None:
        self._python = python
        self.signals, self.report = signals, report
        self._machine = this_machine(environment)
        self.several, self._reread = several, reread
        self.models: list[Deployed] = []
        for one in wanted:
            self.models.append(self.deployed(one, [other.slot for other in self.models]))
        self.settings = with_frontends(given, self._workers, self._machine)
        self._given_environment = without(environment, PORTS_OF_ONE) | self.settings.of_dynamo()
        self._environment = dict(self._given_environment)
        self.supervisor = Supervisor(signals, report, self.settings.stop_timeout_seconds)
        self._folders: Folders | None = None
        self._made: dict[str, Path] = {}
        self._port: Port | None = None
        self._steps: Steps[None] | None = None

    def deployed(self, wanted: WantedModel, slots: Collection[int]) -> Deployed:
        """A model of which nothing runs yet; other models have those slots."""
        settings = settled(wanted.settings, self._machine)
        workers = wanted.workers(settings)
        if self.several:
            workers = [replace(kind, model=wanted.name) for kind in workers]
        return Deployed(wanted=wanted, slot=free_slot(slots), settings=settings, workers=workers)

    @property
    def _workers(self) -> list[Workers]:
        """Of all models."""
        return [kind for model in self.models for kind in model.workers]

    @property
    def worker_count(self) -> int:
        """Workers of this host."""
        return sum(model.worker_count for model in self.models)

    @property
    def _http_ports(self) -> dict[int, str]:
        """Every port on which frontends answer, with the setting that it comes from."""
        settings = self.settings
        if not settings.frontends:
            return {}
        first = settings.frontend_port_base
        own = range(first, first + settings.frontends if first else 0)
        return {settings.dyn_http_port: settings.named("dyn_http_port")} | dict.fromkeys(
            own, settings.named("frontend_port_base")
        )

    @property
    def urls(self) -> list[str]:
        settings = self.settings
        host = settings.dyn_http_host
        return [f"{settings.scheme}://{place_of(host, port)}" for port in self._http_ports]

    def check(self) -> None:
        """Look for what would fail later, before the environment is made, which may take minutes.

        Raises ``SettingError``.
        """
        settings = self.settings
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if most != resource.RLIM_INFINITY and most < _LEAST_DESCRIPTORS:
            raise SettingError(f"ulimit -n {most}: a process needs {_LEAST_DESCRIPTORS} descriptors at least")
        host = settings.dyn_http_host
        if settings.frontends and not has_address(host):
            raise SettingError(f"{settings.named('dyn_http_host')}: this machine has no address {host}")
        # Somebody else's answers on that port would look like our own.
        for port, setting in self._http_ports.items():
            if listens(host, port):
                other = settings.other("dyn_http_port") if port == settings.dyn_http_port else ""
                raise SettingError(f"{setting}: {in_use(place_of(host, port), port)}{other}")
        # Frontends listen there each for itself, and so could those of another service of the same user.
        for flag, given in settings.door_ports.items() if settings.frontends else ():
            if given.isdigit() and int(given) and listens(host, int(given)):
                raise SettingError(f"{flag} {given}: {in_use(place_of(host, given), int(given))}")
        first, said = settings.dyn_system_port_base, settings.named("dyn_system_port_base")
        ports = range(first, first + self.worker_count)
        if ports.start < 1 or ports.stop > _HIGHEST_SYSTEM_PORT + 1:
            raise SettingError(f"{said}: Dynamo takes ports up to {_HIGHEST_SYSTEM_PORT}")
        # Ports that nobody chose are the lowest that are free.
        for port in ports if "dyn_system_port_base" not in settings.defaults else ():
            if listens("127.0.0.1", port):
                raise SettingError(f"{said}: {in_use(f'port {port}', port)}")
        for model in self.models:
            model.wanted.check()

    def run(self) -> NoReturn:
        """Start every process, wait until they are ready, and keep them running until a signal ends all.

        Raises ``Told``, ``SettingError`` and ``NotReady``; nothing is left then.
        """
        try:
            self._start()
            self._wait_ready()
            self.supervisor.supervise(self._step)
        finally:
            self._stop()

    def _start(self) -> None:
        """Start every process. Raises ``SettingError`` when one cannot be started."""
        if self.settings.dyn_discovery_backend == "file" and not self._environment.get("DYN_FILE_KV"):
            self._environment["DYN_FILE_KV"] = str(self._folder("discovery"))
        try:
            for model in self.models:
                self._finish(self.find(model))
            self._finish(self.place(self.models))
            self.report.say(described(self.settings, self._workers, self._machine))
            counts = [count for kind in sharing(self._workers, self._machine) for count in kind]
            self._start_mps(any(count > 1 for count in counts))
            self._open_port()
            for process in self._frontends():
                self._supervise(process)
            for model in self.models:
                self.start_workers(model)
        except OSError as error:
            raise SettingError(reason_of(error)) from error

    def _finish(self, steps: Steps[Answer]) -> Answer:
        """Take every step, while nothing else has to be done. Raises ``Told``."""
        while True:
            try:
                next(steps)
            except StopIteration as done:
                answer: Answer = done.value
                return answer
            self.signals.wait(None)

    def _frontends(self) -> list[Process]:
        if self.several:
            return frontend_processes(
                self.settings, self._environment, self._port, models=self.write_models()
            )
        (model,) = self.models
        found = replace(model.settings, frontends=self.settings.frontends)
        return frontend_processes(found, self._of_model(model), self._port, model.frontend_flags())

    def write_models(self) -> Path:
        """The file that frontends read, as a whole or not at all."""
        folder = self._folder("models")
        path, new = folder / "models.json", folder / "new"
        new.write_text(document(self.models))
        new.rename(path)
        return path

    def _of_model(self, model: Deployed) -> dict[str, str]:
        """The environment of processes that serve one model."""
        from tessera.checkpoint.source import SOURCE_VARIABLE

        own = {**self._environment, **model.settings.of_dynamo()}
        return own | ({SOURCE_VARIABLE: model.source} if model.source else {})

    def _processes_of(self, model: Deployed) -> list[Process]:
        return worker_processes(
            model.settings, model.workers, self._of_model(model), model.share_flags, model.ports
        )

    def start_workers(self, model: Deployed) -> None:
        """Raises ``OSError``."""
        model.children = [self._supervise(process) for process in self._processes_of(model)]

    def _supervise(self, process: Process) -> Child:
        command = [self._python, *process.arguments]
        return self.supervisor.start(
            process.name, process.role, command, process.environment, process.descriptors
        )

    def place(
        self, models: Sequence[Deployed], others: Sequence[Deployed] = (), leaving: Sequence[Deployed] = ()
    ) -> Steps[None]:
        """Find cards, ports and memory for the workers of models, beside those of others that run.

        What is ``leaving`` will have gone. Raises ``SettingError`` where they do not fit.
        """
        running = [kind for model in others for kind in model.workers]
        dealt = iter(on_cards([kind for model in models for kind in model.workers], self._machine, running))
        taken = {port for model in (*others, *leaving) for port in model.ports}
        for model in models:
            model.workers = [next(dealt) for _ in model.workers]
            model.ports = self._free_ports(model.worker_count, taken)
            taken.update(model.ports)
        kinds = [*running, *(kind for model in models for kind in model.workers)]
        on_host: Counter[str] = Counter()
        for kind in kinds:
            on_host[kind.role] += kind.count
        on_card = iter(sharing(kinds, self._machine)[len(running) :])
        for model in models:
            counts = [(on_host[kind.role], next(on_card)) for kind in model.workers]
            model.share_flags = [
                [share_flags(on_host=host, on_card=card) for card in cards] for host, cards in counts
            ]
        if self.several and any(model.worker_count for model in models):
            yield from self._share_memory(models, others, leaving)

    def _share_memory(
        self, models: Sequence[Deployed], others: Sequence[Deployed], leaving: Sequence[Deployed]
    ) -> Steps[None]:
        freed = sum(takes["host"] for model in leaving for takes in model.takes)
        asked = [
            {"name": name, "arguments": [], "card": card, "takes": takes}
            for model in others
            for (name, card), takes in zip(self._places_of(model), model.takes, strict=True)
        ]
        for model in models:
            processes = self._processes_of(model)
            for process, (name, card) in zip(processes, self._places_of(model), strict=True):
                arguments = list(process.arguments[2:])
                asked.append({"name": name, "arguments": arguments, "card": card, "source": model.source})
        host = {
            "workers": asked,
            "nbytes": self._machine.nbytes,
            "free": min(self._machine.nbytes, free_memory_bytes() + freed),
            "cards": {card.entry: card.nbytes for card in self._machine.cards},
        }
        file = self._folder("asked") / "host"
        file.write_text(json.dumps(host))
        words = ["-m", "tessera.worker.together", str(file), "--log-format", self.settings.log_format]
        said = yield from self._ask(words, self._environment, "what adds up the memory of workers")
        if "error" in said:
            raise SettingError(said["error"])
        given = iter(said["workers"][sum(model.worker_count for model in others) :])
        for model in models:
            own = [[next(given) for _ in kind.cards] for kind in model.workers]
            model.takes = [each["takes"] for kind in own for each in kind]
            model.share_flags = [
                [
                    [
                        *flags,
                        *share_flags(host_share=each["host_share"], card_share=each["card_share"]),
                    ]
                    for flags, each in zip(kind_flags, kind, strict=True)
                ]
                for kind_flags, kind in zip(model.share_flags, own, strict=True)
            ]
        self.report.say(f"memory of the workers:\n{said['table']}")

    def _places_of(self, model: Deployed) -> list[tuple[str, str]]:
        """What each worker is called, and its card."""
        return [
            (kind.name(index), card)
            for kind in model.workers
            for index, card in enumerate(placed(kind, self._machine))
        ]

    def _free_ports(self, count: int, taken: Collection[int]) -> list[int]:
        """The lowest on which nothing listens."""
        ports = range(self.settings.dyn_system_port_base, _HIGHEST_SYSTEM_PORT + 1)
        free = (port for port in ports if port not in taken and not listens("127.0.0.1", port))
        lowest = list(islice(free, count))
        if len(lowest) < count:
            raise SettingError(
                f"{self.settings.named('dyn_system_port_base')}: {count} ports are not free above it"
            )
        return lowest

    def _open_port(self) -> None:
        settings = self.settings
        if not settings.frontends:
            return
        host, port = settings.dyn_http_host, settings.dyn_http_port
        try:
            self._port = Port.open(
                host,
                port,
                settings.frontends,
                metrics=self._folder("metrics"),
                own=settings.frontend_port_base,
            )
        except (OSError, OverflowError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            said = f"cannot listen on {place_of(host, port)}: {reason}"
            if isinstance(error, socket.gaierror | UnicodeError):
                raise SettingError(f"{settings.named('dyn_http_host')}: {reason}") from error
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                said = f"{in_use(place_of(host, port), port)}{settings.other('dyn_http_port')}"
            raise SettingError(f"{settings.named('dyn_http_port')}: {said}") from error

    def find(self, model: Deployed) -> Steps[None]:
        """Download a model of a hub for all processes, and join an adapter with its base.

        There are no encode workers for a model that reads text alone. Several workers share each card for one
        that is small, where it is the only one.

        Raises ``SettingError`` for what is no model.
        """
        settings = model.settings
        splits = any(kind.role == "encode" and kind.count for kind in model.workers)
        alone = not (self.several or model.wanted.split)
        shares = alone and most_on_a_card(model.wanted.settings, self._machine) > 1
        is_directory = os.path.isdir(settings.model_path)
        if is_directory and not (splits or shares or settings.model_revision or settings.is_adapter):
            return
        said = yield from self._ask_what_it_is(settings)
        # It is as nobody's token that processes read what was downloaded.
        self._environment = without(self._environment, ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"))
        model.source = json.dumps(said["source"])
        model.settings = replace(settings, model_revision="")
        if settings.is_adapter:
            model.settings = replace(model.settings, model_path=said["source"]["directory"])
        elif not is_directory:
            # Named as it was asked for; a directory's own name may have spaces, which part names.
            model.settings = replace(
                model.settings,
                model_path=said["source"]["directory"],
                served_model_name=settings.served_model_name or settings.model_name,
            )
        if shares:
            each = most_on_a_card(model.wanted.settings, self._machine, parameters=said["parameters"])
            model.workers = [replace(kind, count=each * kind.count) for kind in model.workers]
        if splits and not said["images"]:
            model.workers = [kind for kind in model.workers if kind.role != "encode"]
            reads = f"{model.settings.model_name} reads text alone"
            if not (self.worker_count or self.settings.frontends):
                raise SettingError(f"{reads}: there is nothing to start here")
            self.report.say(f"{reads}: no encode workers are started")

    def _ask_what_it_is(self, settings: LaunchSettings) -> Steps[dict[str, Any]]:
        # A process of its own: models need libraries that are not there before the environment is made.
        words = ["-m", "tessera.models", *model_flags(settings)]
        words += ["--log-format", settings.log_format, "--log-level", settings.log_level]
        own = settings.named("model_path")
        said = yield from self._ask(words, self._given_environment, f"{own}: what looks for it")
        if "error" in said:
            # One that was given without a flag may begin the line already.
            raise SettingError(said["error"] if said["error"].startswith(own) else f"{own}: {said['error']}")
        return said

    def _ask(self, words: Sequence[str], environment: Mapping[str, str], who: str) -> Steps[dict[str, Any]]:
        """What a process answers in JSON; its log is for whoever looks at this process's."""
        answer = self._folder("asked") / "answer"
        pid = self.supervisor.start_other([self._python, *words], environment, answer, errors=False)
        while (status := self.supervisor.status_of(pid)) is None:
            yield
        try:
            said: dict[str, Any] = json.loads(answer.read_bytes())
        except ValueError:
            raise SettingError(f"{who} ended with status {status}") from None
        return said

    def _start_mps(self, shared: bool) -> None:
        if not mps.wanted(self.settings.cuda_mps, shared, self._machine.cards, self._environment):
            return
        folder = self._folder("mps")
        self.supervisor.start_other(mps.COMMAND, mps.of_service(self._environment, folder), folder / "out")
        self._environment |= mps.of_workers(folder)
        self.report.say(
            "workers share a GPU: started NVIDIA's Multi-Process Service (--cuda-mps off turns this off)"
        )

    def _wait_ready(self) -> None:
        """Ask every ``/health`` until the service is ready, and say so.

        Raises ``NotReady`` when a child has ended before, or TESSERA_READY_TIMEOUT_SECONDS are over.
        """
        # Now that the children are under way: it takes 40 ms, for HTTP and logging.
        if sys.flags.no_site:
            import site

            site.main()
        from tessera.launch.ready import Asking, say_ended
        from tessera.logs import log_as, log_settings

        settings = self.settings
        log_as(
            "launch", log_settings(["--log-format", settings.log_format, "--log-level", settings.log_level])
        )
        urls = self.urls
        asking = Asking(self.expected(self.models), settings.ready_timeout_seconds)
        ended = self.supervisor.wait_until(asking.done.is_set)
        if ended is not None:
            asking.hopeless.set()
            say_ended(str(ended))
        if ended is not None or not asking.ready:
            raise NotReady("the service did not become ready; see the messages above")
        if not urls:
            self.report.say(f"ready: {' '.join(child.name for child in self.supervisor.children)}")
            return
        names = ", ".join(model.name for model in self.models)
        said = f"ready at {' '.join(urls)}, model{'s' if self.several else ''} {names}"
        if settings.log_format == "json":
            self.report.say(said)
        else:
            self.report.show(f"tessera: {said}. Try:\n\n{self._examples(urls[0])}\n")

    def expected(self, models: Sequence[Deployed]) -> Expected:
        """What the service is ready with, as to these models."""
        from tessera.launch.ready import Expected

        urls, host = self.urls, self.settings.dyn_system_host
        return Expected(
            frontends=urls,
            together=self.settings.frontends,
            # A host without a frontend has its workers to ask.
            workers=[
                f"http://{place_of(host, port)}" for model in models for port in model.ports if not urls
            ],
            models={model.name if self.several else "": model.here for model in models},
        )

    def _examples(self, url: str) -> str:
        settings = self.settings
        page = ""
        if settings.frontend_page != "off" and "--no-page" not in settings.frontend_flags:
            page = f"  open {url}/ in a browser, or\n\n"
        key = ""
        if self._environment.get("TESSERA_API_KEYS") or any(
            flag.startswith("--api-keys-file") for flag in settings.frontend_flags
        ):
            key = " -H 'Authorization: Bearer KEY'"
        return (
            f"{page}  curl -s {url}/v1/embeddings -H 'Content-Type: application/json'{key} \\\n"
            f'    -d \'{{"model": "{self.models[0].name}", "input": "a yellow heart"}}\'\n'
        )

    def _stop(self) -> None:
        """End every process in order, and remove what was made for them."""
        if self._port is not None:
            self._port.close()
        self.supervisor.stop()
        if self._folders is not None:
            self._folders.remove()

    def _folder(self, name: str) -> Path:
        """A folder that is gone when the service is."""
        if self._folders is None:
            try:
                self._folders = Folders()
                if self._folders.free_bytes < _LEAST_FREE_BYTES:
                    raise OSError(errno.ENOSPC, "less than 8 MiB are left", str(self._folders.path))
            except OSError as error:
                said = f"{error.strerror}; TMPDIR names another place"
                raise OSError(error.errno, said, error.filename) from error
            self.supervisor.inherited.append(self._folders.descriptor)
        if name not in self._made:
            self._made[name] = self._folders.make(name)
        return self._made[name]

    def _step(self) -> float | None:
        """Do what SIGHUP asks for, a step at a time; in how many seconds to go on."""
        if self._steps is None:
            if not self.signals.told_to_reread or self._reread is None:
                return None
            self.signals.told_to_reread = False
            self._steps = reload(self, self._reread)
        try:
            next(self._steps)
        except StopIteration:
            self._steps = None
            return 0.0
        except (SettingError, OSError) as error:
            self._steps = None
            self.report.complain(f"{error}; the models stay as they are")
            return 0.0
        return _STEP_SECONDS
