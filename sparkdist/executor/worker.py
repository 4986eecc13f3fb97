"""What runs in a rank: from a fork, or from a launcher of the framework's own, to an outcome.

The outcome is data: the value or the exception pickled into a memory file, and one frame that
says what it is. The traceback always survives as text.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing.process as multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import types
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TextIO

from sparkdist import rank_context, testing, values, wire
from sparkdist.executor import events, records
from sparkdist.executor.ranks import STACK_SIGNAL
from sparkdist.executor.shortage import shortage
from sparkdist.frameworks import Framework, resolve

_LEAVE_TIME = 5.0  # s that a function's rank gets, its value written, for threads and exit handlers


class Ends(NamedTuple):
    """A rank's descriptors."""

    orders: int
    events: int
    stdout: int
    stderr: int
    outcome: int
    stacks: int


def be_rank(ends: Ends, keep: set[int], framework: Framework, function: bytes) -> NoReturn:
    """Turns a process just forked from the agent into a rank, and never returns."""
    _attach(ends, keep)
    with os.fdopen(ends.orders, "rb") as stream:
        data = stream.read()
    if not data:
        os._exit(1)  # the agent gave up before this rank was to start
    ((orders, _),) = wire.FrameReader(max_body=0).feed(data)
    os.environ.clear()
    os.environ.update(orders["environ"])
    time.tzset()
    os.chdir(orders["cwd"])
    sys.path[:] = orders["sys_path"]
    framework.after_fork(os.environ)
    run(ends, orders, function)


def run(ends: Ends, orders: dict[str, Any], function: bytes) -> NoReturn:
    """Runs the user's code in a process that is set up, leaves its outcome, and ends."""
    stacks = os.fdopen(ends.stacks, "w", closefd=False)
    faulthandler.enable(file=2)  # a crash in C leaves its Python stack in the rank's last lines
    # Ignored since the agent, so that a rank may be asked at any time; Python shall not think it still is.
    signal.pthread_sigmask(signal.SIG_BLOCK, {STACK_SIGNAL})
    signal.signal(STACK_SIGNAL, signal.SIG_DFL)
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    # All of them: a JVM starts Python with some blocked.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if orders["waits"]:
        resolve(*orders["waits"]).show_waits()
    say = partial(events.tell, ends.events)
    printed = partial(events.wait_until_read, (ends.stdout, ends.stderr))
    rank_context.enter(rank_context.RankContext(**orders["context"]), say, printed)
    if orders["sockets"]:
        multiprocessing.current_process()._config["tempdir"] = orders["sockets"]  # type: ignore[attr-defined]
    if orders["logs_json"]:
        records.tell(say)
    program = _Program(ends, orders, function)
    program.run()
    program.leave()


class _Program:
    """The user's function or script in this rank."""

    def __init__(self, ends: Ends, orders: dict[str, Any], function: bytes) -> None:
        self._ends = ends
        self._script: list[str] | None = orders["script"]
        self._faults = [testing.Fault(**fault) for fault in orders["faults"]]
        self._function = function
        self._code = 0
        self._entered = 0.0

    def run(self) -> None:
        """Runs it and says how it ended."""
        self._say(kind="started", pid=os.getpid())
        try:
            value = self._run_script() if self._script else self._run_function()
        except SystemExit as stop:
            self._exited(stop)
        except BaseException as error:
            self._raised(error)
        else:
            self._returned(value)

    def _run_function(self) -> object:
        # Not what started this process: a parser of arguments finds none, as in an interactive session.
        sys.argv[:] = [""]
        sys.modules["__main__"] = types.ModuleType("__main__")
        function, args, kwargs = values.loads(self._function)
        self._enter()
        return function(*args, **kwargs)

    def _run_script(self) -> object:
        assert self._script
        path = self._script[0]
        sys.argv[:] = self._script
        sys.path.insert(0, str(Path(path).resolve().parent))  # of what a link leads to, as python does
        # Not runpy: its __main__ is gone when the script's last line has run, while threads and
        # exit handlers still need it.
        main = types.ModuleType("__main__")
        main.__dict__.update(__file__=path, __loader__=SourceFileLoader("__main__", path), __cached__=None)
        sys.modules["__main__"] = main
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
        self._enter()
        exec(code, main.__dict__)
        return None

    def _enter(self) -> None:
        self._entered = time.monotonic()
        self._say(kind="entered")
        for fault in self._faults:
            testing.arm(fault)

    def _returned(self, value: object) -> None:
        try:
            self._write_outcome(values.dumps(value))
        except Exception as error:
            name = values.type_name(value)
            text = shortage(error) or f"{type(error).__name__}: {values.safe_text(error)}"
            self._write_outcome(values.dumps(None))  # something: the function came to its end
            self._say(kind="unpicklable", type_name=name, message=f"does not pickle ({wire.cut(text)})")
        else:
            seconds = time.monotonic() - self._entered
            self._say(kind="returned", type_name=values.type_name(value), seconds=seconds)

    def _raised(self, error: BaseException) -> None:
        self._code, raised_at = 1, time.time()
        if self._script:
            _print_error(_format(error))  # as python would
        self._write_outcome(values.dump_exception(error) or b"")
        self._say(
            kind="raised",
            type_name=values.type_name(error),
            bases=[values.type_name(kind) for kind in type(error).__mro__],
            message=wire.cut(values.safe_text(error)),
            traceback=wire.cut(_format(error)),
            at=raised_at,
            hint=shortage(error),
        )

    def _exited(self, stop: SystemExit) -> None:
        code, message = stop.code, ""
        if code is not None and not isinstance(code, int):
            code, message = 1, wire.cut(values.safe_text(stop))
            _print_error(message + "\n")
        self._code = int(code or 0)
        if self._script and self._code == 0:
            self._returned(None)
        else:
            self._say(kind="exited", code=self._code, message=message, at=time.time())

    def leave(self) -> NoReturn:
        """Ends the process as the interpreter would, except that a function's value waits for nobody."""
        try:
            if not self._script:
                threading.Thread(target=_end_after, args=(_LEAVE_TIME, self._code), daemon=True).start()
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        finally:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except (OSError, ValueError):
                    pass  # closed by the user, or nobody reads any more
            os._exit(self._code)

    def _write_outcome(self, data: bytes) -> None:
        os.truncate(self._ends.outcome, 0)
        view, offset = memoryview(data), 0
        while offset < len(view):
            offset += os.pwrite(self._ends.outcome, view[offset:], offset)

    def _say(self, **header: Any) -> None:
        events.tell(self._ends.events, header)


def _end_after(seconds: float, code: int) -> None:
    time.sleep(seconds)
    os._exit(code)


def _attach(ends: Ends, keep: set[int]) -> None:
    """Makes the pipes this process's output and closes what belongs to the agent."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    redirect(ends)
    close_all_but(keep | set(ends) | {0, 1, 2})
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def close_all_but(keep: set[int]) -> None:
    """Closes every descriptor that is not named."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            try:
                os.close(int(name))
            except OSError:
                pass  # the descriptor of the listing itself


def redirect(ends: Ends) -> None:
    """Sends this process's output to its agent, line by line."""
    os.dup2(ends.stdout, 1)
    os.dup2(ends.stderr, 2)
    sys.stdout, sys.stderr = _line_writer(1), _line_writer(2)


def _line_writer(fd: int) -> TextIO:
    return os.fdopen(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _format(error: BaseException) -> str:
    """Formats a traceback without our own frames above the user's."""
    tb = error.__traceback__
    while tb and tb.tb_frame.f_code.co_filename in (__file__, values.__file__):
        tb = tb.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, tb or error.__traceback__))
    except Exception:  # a __str__ or __repr__ that raises
        lines = traceback.format_tb(tb or error.__traceback__)
        return "".join(lines) + f"{type(error).__qualname__}: {values.safe_text(error)}\n"


def _print_error(text: str) -> None:
    try:
        sys.stderr.write(text)
    except (OSError, ValueError):
        pass  # closed by the user
