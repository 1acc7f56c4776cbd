"""``tessera embed``: a corpus to a table of vectors, by engines of this command or by a running service."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import uvloop

from tessera.command import OneLineParser
from tessera.errors import ConfigError, TesseraError, TooManyFailures
from tessera.flags import HelpFormatter, add_flags, flags_of, read_flags, take_variables
from tessera.local.model_info import ModelInfo
from tessera.local.plan import EnginePlan, model_of_environment, plan_engines
from tessera.logs import LogSettings, log_as
from tessera.models.base import OutputKind
from tessera.process_exit import leave
from tessera.settings import Revision, Setting
from tessera.terminal import complain, near, say
from tessera_corpus.documents import Documents, DocumentSettings
from tessera_corpus.dry_run import estimate
from tessera_corpus.embedder import Embedder, VectorSettings
from tessera_corpus.engines import EngineEmbedder
from tessera_corpus.item import Source, unique
from tessera_corpus.output.output import Output, known_before
from tessera_corpus.output.row import Column, VectorKind
from tessera_corpus.output.settings import OutputSettings
from tessera_corpus.pdf import PictureFormat
from tessera_corpus.progress import Show, Watch, display, keep_showing
from tessera_corpus.ray.settings import RaySettings
from tessera_corpus.run import Progress, fresh, keep, run
from tessera_corpus.service import KEY_VARIABLE, ServiceEmbedder, ServiceSettings
from tessera_corpus.sources.apart import Apart
from tessera_corpus.sources.choice import STANDARD_INPUT, open_source
from tessera_corpus.sources.counted import Position
from tessera_corpus.sources.lines import Honoured
from tessera_corpus.sources.messages import Sources
from tessera_corpus.sources.passed import said_of
from tessera_corpus.sources.settings import SourceSettings

_TEXT: Final = """\
Embeds a corpus: folders and globs of pictures, PDF and text files, JSON lines, tables. The vectors
go to a table in a directory; the same command goes on where one was stopped, however it ended.
Engines run in processes of this command, one for each GPU, or, with --url, at a running service,
or, with --ray, on a Ray cluster.

Flags of workers are taken as well, such as --extra-engine-args: python -m tessera.worker --help."""

_STATUSES: Final = """\
exit status: 0 everything is embedded; 1 nothing was found, or the run could not go on; 2 the
command line is wrong; 3 the rest is embedded, and errors.parquet says why some items are not;
4 more items than --max-errors have failed; 130, 143 stopped by Ctrl-C, SIGTERM. After 1, 4, 130
and 143 what was embedded is kept, and the same command goes on."""


# Threads read and write beside the event loop. Each keeps the interpreter for as long as this, 5 ms unset,
# whenever something arrives for the loop: by default, texts of 32 tokens were a fifth slower.
_SWITCH_SECONDS: Final = 0.0002


class Status(IntEnum):
    DONE = 0
    FAILED = 1
    USAGE = 2
    ITEMS_FAILED = 3
    TOO_MANY_FAILED = 4
    SIGNALLED = 128


class QuietLog(LogSettings, frozen=True, kw_only=True):
    """Of a command that shows its progress itself."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Setting(
            flag="--log-level",
            help="the lowest level of lines that are logged; engines log their sizes at info",
        ),
    ] = "warning"


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    model: Annotated[
        str,
        Setting(
            flag="--model",
            help="a checkpoint directory, or ORG/NAME[@REVISION] of a hub; TESSERA_MODEL_PATH by default, or "
            "the demonstration model; with --url a name that is served",
        ),
    ] = ""
    revision: Revision = ""
    output: Annotated[OutputSettings, Setting(group="output")]
    source: Annotated[SourceSettings, Setting(group="sources")] = SourceSettings()
    documents: Annotated[DocumentSettings, Setting(group="pages of PDF files")] = DocumentSettings()
    vectors: Annotated[VectorSettings, Setting(group="vectors")] = VectorSettings()
    service: Annotated[ServiceSettings, Setting(group="service")] = ServiceSettings()
    ray: Annotated[RaySettings, Setting(group="Ray")] = RaySettings()
    split: Annotated[
        bool,
        Setting(
            flag="--split",
            help="an encode and an embed worker for each GPU, in place of one that runs both stages",
        ),
    ] = False
    dry_run: Annotated[
        bool,
        Setting(
            flag="--dry-run",
            help="read everything, embed a few items, and say how long the rest would take; writes nothing",
        ),
    ] = False
    progress: Annotated[
        Show, Setting(flag="--progress", help="a bar, a JSON line a second, none; auto: by the terminal")
    ] = Show.AUTO
    log: Annotated[QuietLog, Setting(group="log")] = QuietLog()


def main(arguments: Sequence[str], prog: str = "tessera embed") -> int:
    """Ends the process: a thread that waits for standard input would keep it otherwise."""
    leave(_run(arguments, prog))


def _run(arguments: Sequence[str], prog: str) -> int:
    parser = OneLineParser(
        prog=prog, description=_TEXT, epilog=_STATUSES, formatter_class=_Formatter, allow_abbrev=False
    )
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="a folder, a glob, a picture, PDF, text, JSON lines, Parquet or Lance; - is standard input",
    )
    add_flags(parser, RunSettings)
    try:
        take_variables(parser, RunSettings)
    except ConfigError as error:
        complain(f"{prog}: {error.message}")
        return Status.USAGE
    try:
        parsed, passed = parser.parse_known_args(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    try:
        settings = read_flags(RunSettings, parsed)
        log_as("embed", settings.log)
        _check_passed(passed, url=settings.service.url)
        sys.setswitchinterval(_SWITCH_SECONDS)
        return uvloop.run(_Run(settings, parsed.sources, passed).go())
    except _UnknownFlag as error:
        complain(f"{prog}: {error}; {prog} --help lists what there is")
        return Status.USAGE
    except TesseraError as error:
        complain(f"{prog}: {error.message}")
        return Status.FAILED


class _Formatter(HelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Leaves the texts as they are, and ends flags with their defaults."""


class _UnknownFlag(Exception):
    """A flag that nothing here has, or with a value that a worker refuses."""


def _check_passed(passed: Sequence[str], *, url: str) -> None:
    if not passed:
        return
    # Imported for these alone.
    from tessera.local.flags import check_worker_flags, worker_flags

    known = worker_flags()
    for word in passed:
        if word.startswith("--") and (flag := word.partition("=")[0]) not in known:
            raise _UnknownFlag(f"there is no flag {flag}{near(flag, {*known, *flags_of(RunSettings)})}")
        if word.partition("=")[0] == "--disaggregation-mode":
            raise _UnknownFlag("--disaggregation-mode is for workers of a service; --split parts the stages")
    if url:
        raise _UnknownFlag(f"{passed[0]} is for engines here, and --url names a service")
    try:
        check_worker_flags(passed)
    except ConfigError as error:
        raise _UnknownFlag(error.message) from error


class _Run:
    def __init__(self, settings: RunSettings, sources: Sequence[str], passed: Sequence[str]) -> None:
        self._settings = settings
        self._sources = sources
        self._passed = passed
        self._signal = 0

    async def go(self) -> int:
        """The exit status. Raises ``TesseraError``."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: int) -> None:
            if self._signal:
                # Told twice: what is not published is done again by the next run.
                leave(Status.SIGNALLED + number)
            self._signal = number
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        try:
            return await self._embed()
        except asyncio.CancelledError:
            sys.stderr.write("\nstopped; what was embedded is kept, and the same command goes on\n")
            return Status.SIGNALLED + self._signal

    async def _embed(self) -> int:
        settings = self._settings
        # Before engines are loaded: what is wrong with the command is said at once.
        self._here = open_source(self._sources, settings.source, Honoured(models=(), dimensions=0))
        if settings.ray.address:
            return await self._on_ray()
        embedder = await self._embedder()
        try:
            served = embedder.served
            honoured = self._honoured(served)
            source = Apart(Sources(words=self._sources, settings=settings.source, honoured=honoured))
            # A service gets less to read.
            form = PictureFormat.PNG if settings.service.url else PictureFormat.BMP
            documents = await asyncio.to_thread(Documents, settings.documents, form)
            try:
                if settings.dry_run:
                    return await self._estimate(source, documents, embedder, self._kind(served))
                return await self._into(source, documents, embedder, self._kind(served))
            finally:
                await asyncio.to_thread(documents.close)
        finally:
            await embedder.close()

    async def _into(self, source: Source, documents: Documents, embedder: Embedder, kind: VectorKind) -> int:
        progress = Progress()
        output = await self._output(kind)

        def done(id: str, content_hash: bytes) -> bool:
            if found := output.done(id, content_hash):
                progress.done_before += 1
            return found

        rows = fresh(documents.pages(unique(source.rows()), done), output.done, progress)
        watch = Watch(progress, embedder, source.position)
        return await self._shown(
            run(rows, embedder, output, progress), output, progress, watch, source.passed_over
        )

    async def _on_ray(self) -> int:
        from tessera_corpus.ray.cluster import Pools, joined
        from tessera_corpus.ray.pipeline import RemoteEngines, embedded
        from tessera_corpus.ray.stages import Embedding, Reading, served_here

        settings, progress = self._settings, Progress()
        if settings.service.url or settings.dry_run or STANDARD_INPUT in self._sources:
            raise ConfigError("--ray goes with files that its machines read: not with --url, --dry-run or -")
        model = self._model()
        served = await asyncio.to_thread(
            served_here, model, settings.revision, self._passed, settings.vectors
        )
        # Not on a thread: a cluster that is started here ends with the thread that started it.
        with joined(settings.ray) as resources:
            pools = Pools.of(resources, settings.ray)
            reading = Reading(
                directory=os.getcwd(),
                words=self._sources,
                source=settings.source,
                documents=settings.documents,
                honoured=self._honoured(served),
            )
            embedding = Embedding(
                directory=os.getcwd(),
                model=model,
                revision=settings.revision,
                passed=self._passed,
                split=settings.split,
                engines_on_host=pools.engines_on_host,
                vectors=settings.vectors,
                served=served,
            )
            output = await self._output(self._kind(served))

            def done(id: str, content_hash: bytes) -> None:
                progress.done_before += output.done(id, content_hash)

            passed_over = Counter[str]()
            made = embedded(reading, embedding, pools, output.known, done, passed_over)
            watch = Watch(progress, RemoteEngines(), lambda: Position(read=0))
            work = keep(made, output, progress)
            return await self._shown(work, output, progress, watch, lambda: passed_over)

    async def _output(self, kind: VectorKind) -> Output:
        settings = self._settings
        return await asyncio.to_thread(Output, settings.output, kind, settings.source.shard, self._here.gives)

    def _honoured(self, served: ModelInfo) -> Honoured:
        if served.checkpoint == "random":
            complain(f"{served.name} has random weights: its vectors mean nothing")
        return Honoured(
            models=(served.name,),
            dimensions=served.width,
            truncate=self._settings.vectors.truncate.truncate,
        )

    async def _shown(
        self,
        work: Coroutine[Any, Any, None],
        output: Output,
        progress: Progress,
        watch: Watch,
        passed_over: Callable[[], Mapping[str, int]],
    ) -> int:
        """Do it with its progress on the screen; the exit status."""
        settings = self._settings
        shown = display(settings.progress)
        showing = keep_showing(watch, shown)
        status = Status.DONE
        try:
            await work
        except TooManyFailures as error:
            complain(f"\n{error.message}")
            status = Status.TOO_MANY_FAILED
        finally:
            showing.cancel()
            shown.close()
        rate = progress.embedded / (progress.seconds - progress.starting_seconds)
        failed = f", {progress.failed:,} failed: {output.errors_path}" if progress.failed else ""
        before = f", {progress.done_before:,} done before" if progress.done_before else ""
        warned = f", {progress.warned:,} with a warning" if progress.warned else ""
        gone = f", {output.gone:,} gone and removed" if output.gone else ""
        embedded = f"{progress.embedded:,} items embedded ({rate:,.1f}/s)"
        say(f"{settings.output.out}: {embedded}{warned}{before}{gone}{failed}")
        if (failure := progress.first_failure) is not None:
            which = "the first that failed" if progress.failed > 1 else "what failed"
            say(f"{which}: {failure.id}: {failure.reason}")
        passed = passed_over()
        if passed:
            say(said_of(passed))
        if status is not Status.DONE:
            return status
        if progress.failed:
            return Status.ITEMS_FAILED
        return self._nothing(passed) if not (progress.taken or progress.done_before) else Status.DONE

    def _nothing(self, passed: Mapping[str, int]) -> Status:
        """The status of a run for which there was nothing: of a part of several that is no fault."""
        if not passed and self._settings.source.shard.count > 1:
            return Status.DONE
        if not passed and not any(Path(word).is_dir() for word in self._sources):
            return Status.DONE
        complain("nothing to embed was found")
        return Status.FAILED

    async def _estimate(
        self, source: Source, documents: Documents, embedder: Embedder, kind: VectorKind
    ) -> int:
        known = await asyncio.to_thread(known_before, self._settings.output, kind)
        found = await estimate(
            lambda done: documents.pages(unique(source.rows()), done),
            embedder,
            known.has,
            value_bytes={"float32": 4, "float16": 2, "int8": 1}[self._settings.output.dtype],
        )
        say("\n".join(found.lines()))
        passed = source.passed_over()
        if passed:
            say(said_of(passed))
        return Status.DONE if found.items or found.done_before or found.failed else self._nothing(passed)

    async def _embedder(self) -> Embedder:
        settings = self._settings
        if settings.service.url:
            if settings.split:
                raise ConfigError("--split is for engines here, and --url names a service")
            key = os.environ.get(KEY_VARIABLE)
            return await ServiceEmbedder.start(settings.service, settings.vectors, settings.model, key)
        plan = await asyncio.to_thread(self._plan, self._model())
        return await EngineEmbedder.open(plan, settings.vectors)

    def _model(self) -> str:
        return self._settings.model or model_of_environment()

    def _plan(self, named: str) -> EnginePlan:
        settings = self._settings
        bar = settings.progress in (Show.AUTO, Show.BAR) and sys.stderr.isatty()
        return plan_engines(
            named,
            settings.revision,
            settings.vectors.options,
            flags=self._passed,
            split=settings.split,
            log=["--log-level", settings.log.level, "--log-format", settings.log.format.value],
            bar=bar,
        )

    def _kind(self, served: ModelInfo) -> VectorKind:
        settings = self._settings
        options = {"truncate": settings.vectors.truncate.value}
        if settings.vectors.max_tokens:
            options["max_tokens"] = str(settings.vectors.max_tokens)
        asked = settings.vectors.asked(served)
        first = asked[0] == served.outputs[0] and asked[0].kind is not OutputKind.SPARSE
        return VectorKind(
            model=served.name,
            fingerprint=served.fingerprint,
            width=served.width if first else 0,
            tokens=first and served.kind is OutputKind.TOKENS,
            dtype=settings.output.dtype,
            role=settings.vectors.input_type,
            options=options,
            others=tuple(
                [
                    Column(name=output.name, kind=output.kind, width=output.width)
                    for output in (asked[1:] if first else asked)
                ]
            ),
        )
