"""A whole service on this machine: checked, started, waited for, kept running, and ended."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

from tessera.launch import mps
from tessera.launch.children import Signals, Told, collect, spawn
from tessera.launch.folders import Folders
from tessera.launch.port import Port
from tessera.launch.processes import Workers, model_flags, processes
from tessera.launch.report import Report
from tessera.launch.settings import LaunchSettings, SettingError
from tessera.launch.split import described, on_cards, settled, sharing, with_frontends
from tessera.launch.supervisor import Supervisor
from tessera.machine import this_machine

# Dynamo's.
_HIGHEST_SYSTEM_PORT: Final = 32767


def status_of(run: Callable[[], None], report: Report) -> int:
    """The status with which the launcher ends: of the signal that told it to, 1 for what it complains of."""
    try:
        run()
    except (SettingError, NotReady) as error:
        report.complain(str(error))
        return 1
    except Told as told:
        return told.status
    return 0


class NotReady(Exception):
    """A process ended before the service was ready, or time was up."""


class Service:
    """The processes of a service. Raises ``SettingError`` for settings that cannot be used.

    ``workers`` makes workers of the settings once these have numbers. ``python`` is the interpreter of every
    process, and ``environment`` their environment.
    """

    def __init__(
        self,
        given: LaunchSettings,
        workers: Callable[[LaunchSettings], list[Workers]],
        *,
        python: str,
        environment: Mapping[str, str],
        signals: Signals,
        report: Report,
    ) -> None:
        self._python = python
        self._signals, self._report = signals, report
        self._machine = this_machine(environment)
        settings = settled(given, self._machine)
        self._workers = workers(settings)
        self._settings = with_frontends(settings, self._workers, self._machine)
        self._environment = {**environment, **self._settings.of_dynamo()}
        self._supervisor = Supervisor(signals, report, self._settings.stop_timeout_seconds)
        self._folders: Folders | None = None
        self._port: Port | None = None

    @property
    def worker_count(self) -> int:
        """Workers of this host."""
        return sum(kind.count for kind in self._workers)

    @property
    def _http_ports(self) -> dict[int, str]:
        """Every port on which frontends answer, with the setting that it comes from."""
        settings = self._settings
        if not settings.frontends:
            return {}
        first = settings.frontend_port_base
        own = range(first, first + settings.frontends if first else 0)
        return {settings.dyn_http_port: settings.named("dyn_http_port")} | dict.fromkeys(
            own, settings.named("frontend_port_base")
        )

    @property
    def _system_ports(self) -> range:
        first = self._settings.dyn_system_port_base
        return range(first, first + self.worker_count)

    def check(self) -> None:
        """Look for what would fail later, before the environment is made, which may take minutes.

        Raises ``SettingError``.
        """
        settings = self._settings
        # Somebody else's answers on that port would look like our own.
        for port, setting in self._http_ports.items():
            if _listens(settings.dyn_http_host, port):
                raise SettingError(f"{setting}: something listens on {settings.dyn_http_host}:{port} already")
        ports, said = self._system_ports, settings.named("dyn_system_port_base")
        if ports.start < 1 or ports.stop > _HIGHEST_SYSTEM_PORT + 1:
            raise SettingError(f"{said}: Dynamo takes ports up to {_HIGHEST_SYSTEM_PORT}")
        for port in ports:
            if _listens("127.0.0.1", port):
                raise SettingError(f"{said}: something listens on port {port} already")
        if not os.path.isdir(settings.model_path) and settings.hub_model is None:
            raise SettingError(
                f"{settings.named('model_path')}: no such directory; a model of a hub is ORG/NAME"
            )

    def run(self) -> NoReturn:
        """Start every process, wait until they are ready, and keep them running until a signal ends all.

        Raises ``Told``, ``SettingError`` and ``NotReady``; nothing is left then.
        """
        try:
            self._start()
            self._wait_ready()
            self._supervisor.supervise()
        finally:
            self._stop()

    def _start(self) -> None:
        """Start every process. Raises ``SettingError`` when one cannot be started."""
        if self._settings.dyn_discovery_backend == "file" and not self._environment.get("DYN_FILE_KV"):
            self._environment["DYN_FILE_KV"] = str(self._folder("discovery"))
        try:
            self._find_model()
            workers = on_cards(self._workers, self._machine)
            shares = sharing(workers, self._machine)
            self._report.say(described(self._settings, workers, self._machine))
            self._start_mps(any(count > 1 for counts in shares for count in counts))
            self._open_port()
            for process in processes(self._settings, workers, self._environment, shares, self._port):
                command = [self._python, *process.arguments]
                self._supervisor.start(
                    process.name, process.role, command, process.environment, process.descriptors
                )
        except OSError as error:
            raise SettingError(str(error)) from error

    def _open_port(self) -> None:
        settings = self._settings
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
            said = f"cannot listen on {host}:{port}: {error}"
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                said = f"something listens on {host}:{port} already"
            raise SettingError(f"{settings.named('dyn_http_port')}: {said}") from error

    def _find_model(self) -> None:
        """Download a model of a hub for all processes; no encode workers for one that reads text alone.

        Raises ``SettingError`` for what is no model.
        """
        from tessera.checkpoint.source import SOURCE_VARIABLE

        settings = self._settings
        splits = any(kind.role == "encode" and kind.count for kind in self._workers)
        if os.path.isdir(settings.model_path) and not splits and not settings.model_revision:
            return
        said = self._ask_what_the_model_is()
        # It is as nobody's token that processes read what was downloaded.
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            self._environment.pop(name, None)
        self._environment[SOURCE_VARIABLE] = json.dumps(said["source"])
        self._settings = replace(settings, model_revision="")
        if not os.path.isdir(settings.model_path):
            # Named as it was asked for; a directory's own name may have spaces, which part names.
            self._settings = replace(
                self._settings,
                model_path=said["source"]["directory"],
                served_model_name=settings.served_model_name or settings.model_name,
            )
        if splits and not said["images"]:
            self._workers = [kind for kind in self._workers if kind.role != "encode"]
            reads = f"{self._settings.model_name} reads text alone"
            if not (self.worker_count or self._settings.frontends):
                raise SettingError(f"{reads}: there is nothing to start here")
            self._report.say(f"{reads}: no encode workers are started")

    def _ask_what_the_model_is(self) -> dict[str, Any]:
        # A process of its own: models need libraries that are not there before the environment is made.
        answer = self._folder("model") / "answer"
        settings = self._settings
        words = ["-m", "tessera.models", *model_flags(settings)]
        words += ["--log-format", settings.log_format, "--log-level", settings.log_level]
        # Its progress is for whoever looks at this process's.
        pid = spawn([self._python, *words], self._environment, output=answer, errors=False)
        try:
            while (status := collect(pid)) is None:
                self._signals.wait(None)
        except Told:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        try:
            said: dict[str, Any] = json.loads(answer.read_bytes())
        except ValueError:
            raise SettingError(
                f"{settings.named('model_path')}: what looks for it ended with status {status}"
            ) from None
        if "error" in said:
            # One that was given without a flag may begin the line already.
            own = settings.named("model_path")
            raise SettingError(said["error"] if said["error"].startswith(own) else f"{own}: {said['error']}")
        return said

    def _start_mps(self, shared: bool) -> None:
        if not mps.wanted(self._settings.cuda_mps, shared, self._machine.cards, self._environment):
            return
        folder = self._folder("mps")
        self._supervisor.start_other(mps.COMMAND, mps.of_service(self._environment, folder), folder / "out")
        self._environment |= mps.of_workers(folder)
        self._report.say(
            "workers share a card: started NVIDIA's Multi-Process Service (CUDA_MPS=off turns this off)"
        )

    def _wait_ready(self) -> None:
        """Ask every ``/health`` until the service is ready, and say so.

        Raises ``NotReady`` when a child has ended before, or READY_TIMEOUT_SECONDS are over.
        """
        # Now that the children are under way: it takes 40 ms, for HTTP and logging.
        if sys.flags.no_site:
            import site

            site.main()
        from tessera.launch.ready import Asking, Expected, say_ended
        from tessera.logs import log_as, log_settings

        settings = self._settings
        log_as(
            "launch", log_settings(["--log-format", settings.log_format, "--log-level", settings.log_level])
        )
        counts = {kind.role: kind.count for kind in self._workers}
        urls = [f"{settings.scheme}://{settings.dyn_http_host}:{port}" for port in self._http_ports]
        expected = Expected(
            frontends=urls,
            together=settings.frontends,
            # A host without a frontend has its workers to ask.
            workers=[f"http://{settings.dyn_system_host}:{port}" for port in self._system_ports if not urls],
            embed=counts.get("agg", 0) + counts.get("embed", 0),
            encode=counts.get("encode", 0),
        )
        asking = Asking(expected, settings.ready_timeout_seconds)
        ended = self._supervisor.wait_until(asking.done.is_set)
        if ended is not None:
            asking.hopeless.set()
            say_ended(ended)
        if ended is not None or not asking.ready:
            raise NotReady("the service did not become ready; see the messages above")
        if not urls:
            self._report.say(f"ready: {' '.join(child.name for child in self._supervisor.children)}")
            return
        said = f"ready at {' '.join(urls)}, model {settings.model_name}"
        if settings.log_format == "json":
            self._report.say(said)
        else:
            self._report.show(f"tessera: {said}. Try:\n\n{self._examples(urls[0])}\n")

    def _examples(self, url: str) -> str:
        settings = self._settings
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
            f'    -d \'{{"model": "{settings.model_name}", "input": "a yellow heart"}}\'\n'
        )

    def _stop(self) -> None:
        """End every process in order, and remove what was made for them."""
        if self._port is not None:
            self._port.close()
        self._supervisor.stop()
        if self._folders is not None:
            self._folders.remove()

    def _folder(self, name: str) -> Path:
        """A new folder that is gone when the service is."""
        if self._folders is None:
            self._folders = Folders()
            self._supervisor.inherited.append(self._folders.descriptor)
        return self._folders.make(name)


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port)):
            return True
    except (OSError, OverflowError, UnicodeError):
        return False
