"""Tries a tokenizer in a child process, which it may end: its library aborts where memory ends."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import resource
import select
import signal
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from tessera.errors import CheckpointError
from tessera.sandbox.confinement import confine, die_with_parent

if TYPE_CHECKING:
    from tessera.checkpoint.tokenizer import PlainTokenizer

# The texts of a trial take a good tokenizer some 20 MB and 30 ms.
_MEMORY_BYTES: Final = 1 << 30
_CPU_SECONDS: Final = 5
# A child that uses no processor time hangs, and says nothing of the tokenizer: it is let go.
_WAIT_SECONDS: Final = 120

log = logging.getLogger(__name__)

_RUN: Final = 28
_MOST_TEXTS: Final = 1024
_MOST_CHARACTERS: Final = 256
# One character of each 61: some of every script.
_SCRIPTS: Final = range(0xA1, 0x30000, 61)


def try_tokenizer(tokenizer: PlainTokenizer) -> None:
    """Make texts into tokens in a child process; raises ``CheckpointError`` where that ends it.

    A rule may write a hundred characters for each that it finds, and there may be four such rules: a text of
    28 letters would then end each process that reads it. The texts are runs of every character of ASCII, of
    every text that the tokenizer's own rules look for, and some of every script. A regular expression that
    takes a time that doubles with each character ends the child by its processor time. What the library
    raises is an error of one text, which requests have as well.
    """
    texts = list(_texts(tokenizer))
    with warnings.catch_warnings():
        # From Python 3.12 on of a process with threads: the child calls nothing that they may hold a lock of.
        warnings.simplefilter("ignore", DeprecationWarning)
        parent = os.getpid()
        pid = os.fork()
    if pid == 0:
        tried = False
        try:
            _try(tokenizer, texts, parent)
            tried = True
        finally:
            # Without the exit handlers of the parent.
            os._exit(0 if tried else 1)
    status = _status_of(pid)
    if not os.WIFSIGNALED(status):
        if status:
            log.warning("%s: the tokenizer could not be tried", tokenizer.path)
        return
    number = os.WTERMSIG(status)
    if number in (signal.SIGXCPU, signal.SIGKILL):
        why = f"takes more than {_CPU_SECONDS} s over {_RUN} equal characters, or was ended"
    else:
        why = f"ends the process ({signal.Signals(number).name}) over {_RUN} equal characters"
    raise CheckpointError(f"{tokenizer.path}: this tokenizer {why}")


def _texts(tokenizer: PlainTokenizer) -> Iterator[str]:
    for code in range(0x20, 0x7F):
        yield chr(code) * _RUN + ("!" if code != 0x21 else "?")
    rules = {text: None for part in _rules(tokenizer) for text in _strings(part)}
    for text in list(rules)[:_MOST_TEXTS]:
        yield text[:_MOST_CHARACTERS] * _RUN
    yield "".join(map(chr, filter(lambda code: not 0xD800 <= code < 0xE000, _SCRIPTS)))


def _rules(tokenizer: PlainTokenizer) -> Iterator[Any]:
    for part in (tokenizer.tokenizer.normalizer, tokenizer.tokenizer.pre_tokenizer):
        if part is not None:
            # As JSON, without the vocabulary.
            yield json.loads(part.__getstate__())


def _strings(rule: Any) -> Iterator[str]:
    """Yield the texts that a rule looks for, and the characters of its regular expressions."""
    if isinstance(rule, dict):
        for name, value in rule.items():
            if isinstance(value, str) and name in ("String", "content", "prepend"):
                yield value
            elif isinstance(value, str) and name == "Regex":
                yield from filter(str.isalnum, set(value))
            else:
                yield from _strings(value)
    elif isinstance(rule, list):
        for value in rule:
            yield from _strings(value)


def _try(tokenizer: PlainTokenizer, texts: list[str], parent: int) -> None:
    gc.disable()
    die_with_parent(parent)
    null = os.open(os.devnull, os.O_WRONLY)
    # Where the library says that memory has ended: this process says it better.
    os.dup2(null, 2)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGABRT, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    limit = math.ceil(used.ru_utime + used.ru_stime) + _CPU_SECONDS
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))
    confine(memory_bytes=_MEMORY_BYTES, filtered=False)
    for text in texts:
        with suppress(BaseException):
            tokenizer.tokenizer.encode(text, add_special_tokens=False)


def _status_of(pid: int) -> int:
    """Wait for the child and return its status, 0 where another part of this process has taken it."""
    descriptor = os.pidfd_open(pid)
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        if not ended.poll(_WAIT_SECONDS * 1000):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.waitpid(pid, 0)
            return 1
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return 0
    finally:
        os.close(descriptor)
