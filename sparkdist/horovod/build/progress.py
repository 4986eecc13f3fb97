"""Runs a tool with its output in a log, and shows how far it is."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sparkdist.horovod.build.diagnosis import BuildError, first_cause

_PERCENT = re.compile(rb"\[ *(\d+)%\]")
_LOOK = 1.0  # s between looks at a tool that says nothing
_GRACE = 3.0  # s that a tool gets to end after SIGTERM

Watch = Callable[[int], None]


class Progress:
    """Shows percent and time: on a terminal in one line, elsewhere a line for each tenth.

    Args:
        what: What is going on.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._started = time.monotonic()
        self._shown = -1
        self._terminal = sys.stderr.isatty()

    def __call__(self, percent: int) -> None:
        """Shows `percent`, if it is news."""
        text = f"{self._what}: {percent:3d} %, {time.monotonic() - self._started:.0f} s"
        if self._terminal:
            print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)
        elif percent // 10 > self._shown // 10:
            print(text, file=sys.stderr, flush=True)
        self._shown = percent

    def close(self) -> None:
        """Takes the line off a terminal."""
        if self._terminal and self._shown >= 0:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def run_tool(
    command: Sequence[str | Path], log: Path, environ: Mapping[str, str], watch: Watch | None = None
) -> None:
    """Runs `command` with all that it says at the end of `log`.

    Whatever ends this ends the tool, with all that it started.

    Raises:
        BuildError: It failed; the message is the line of its output that says why.
    """
    start = log.stat().st_size if log.exists() else 0
    with log.open("ab") as output:
        output.write(f"$ {' '.join(map(str, command))}\n".encode())
        output.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environ},
            start_new_session=True,  # a Ctrl-C is for us, who end them all
        )
        try:
            _copy(process, output.fileno(), watch)
            code = process.wait()
        except BaseException:
            _end(process)
            raise
    if code:
        with log.open(errors="replace") as file:
            file.seek(start)
            cause = first_cause(file.read())
        raise BuildError(cause or f"{Path(command[0]).name} ended with code {code}", log)


def _copy(process: subprocess.Popen[bytes], output: int, watch: Watch | None) -> None:
    """Copies what the tool says until all have closed the pipe."""
    assert process.stdout is not None
    percent = 0
    with selectors.DefaultSelector() as selector, process.stdout as pipe:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            if selector.select(_LOOK):
                data = os.read(pipe.fileno(), 1 << 16)
                if not data:
                    return
                os.write(output, data)
                if found := _PERCENT.findall(data):
                    percent = int(found[-1])
            if watch is not None:
                watch(percent)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a tool and all of its session: compilers of a make, a make of a pip."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
