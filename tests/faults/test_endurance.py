"""Many runs in one session: what fails now and then, servers that end when idle, code that changes."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from sparkdist import Launcher, ResultError, TrainingFailed
from tests import support
from tests.faults import programs
from tests.faults.driving import drive
from tests.faults.ways import Way


def launcher(way: Way, **settings: object) -> Launcher:
    """Of plain functions, which start soonest."""
    return Launcher("plain", num_processes=2, local_mode=way.local_mode, **{"timeout": 60, **settings})  # type: ignore


# --- failures -----------------------------------------------------------------------------------

RUNS = 50
FAULTS = [
    (programs.raise_it, (LookupError, "wanted"), "rank 1 raised LookupError: wanted"),
    (os._exit, (7,), "rank 1 exited with code 7"),
    (programs.kill_itself, (9,), "rank 1 was killed by SIGKILL"),
    (programs.say_and_die, ("last words",), "last words"),
    (threading.Lock, (), "rank 1 returned a _thread.lock that does not pickle"),
]


def in_rank_1(fault, *args):
    return fault(*args) if programs.rank() == 1 else programs.rank()


def used() -> tuple[int, int, int, list[str]]:
    """What this process holds: descriptors, threads, processes of the session, temporary files."""
    homes = Path(tempfile.gettempdir()).glob(f"sparkdist-{os.getpid()}-*")
    return (
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        len(support.session_processes()),
        sorted(
            os.path.join(top, name)
            for home in homes
            for top, *names in os.walk(home)
            for name in itertools.chain(*names)
        ),
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_fifty_runs_of_which_every_second_fails(fast: Way):
    run = launcher(fast)
    for i in range(RUNS):
        if i == RUNS // 5:  # all that comes once is there
            support.wait_until(lambda: not support.run_processes(), 5)
            before, memory = used(), programs.memory()[0]
        began = time.monotonic()
        if i % 2:
            fault, args, text = FAULTS[i // 2 % len(FAULTS)]
            with pytest.raises((TrainingFailed, ResultError)) as caught:
                run.launch(in_rank_1, fault, *args)
            assert text in str(caught.value)
        else:
            assert run.launch(programs.rank).values == [0, 1]
        assert time.monotonic() - began < 30
    assert support.wait_until(lambda: used() == before, 10), (before, used())
    assert programs.memory()[0] - memory < 40 << 10


# --- servers that end when idle -----------------------------------------------------------------


def outlast(seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.1)
    return programs.rank()


def test_a_server_does_not_end_under_a_run(fast: Way):
    run = launcher(fast, idle_timeout=0.1)
    assert run.launch(outlast, 2.5).values == [0, 1]  # it looks once a second


@pytest.mark.slow
def test_twenty_runs_just_when_their_server_ends(fast: Way):
    """It looks a second after the last run, so runs are started around then."""
    run = launcher(fast, idle_timeout=0.01)
    for i in range(20):
        assert run.launch(programs.rank).values == [0, 1]
        threading.Event().wait(0.8 + i * 0.02)  # the moment is the fault
    assert run.launch(programs.rank).values == [0, 1]
    fresh = launcher(fast, idle_timeout=0.02)
    before = support.forkservers()
    fresh.launch(programs.rank)
    assert support.wait_until(lambda: not support.forkservers() - before, 5)


# --- code that changes --------------------------------------------------------------------------


def read_all(module: str, shipped: str) -> tuple[str, str, str]:
    import importlib

    import sparkdist

    path = sparkdist.context().shipped(shipped)
    return importlib.import_module(module).VALUE, path.read_text(), path.with_name("plugin.py").read_text()


def test_a_module_and_a_shipped_file_change_between_two_runs(
    fast: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(tmp_path))
    module, data, plugin = tmp_path / "changing_module.py", tmp_path / "data.txt", tmp_path / "plugin.py"
    told = []
    for text in ("first", "the second"):
        module.write_text(f"VALUE = {text!r}\ndef work():\n    return VALUE\n")
        data.write_text(text)
        plugin.write_text(text)
        work = __import__("changing_module").work
        run = launcher(fast, ship=[module, data, plugin])
        values = [
            run.launch(program, *args).values[1]
            for program, args in (
                (work, ()),
                (read_all, ("changing_module", "data.txt")),
            )
        ]
        told.append(values)
    assert told == [[text, (text, text, text)] for text in ("first", "the second")]
    sys.modules.pop("changing_module")


ANOTHER = """
def mark():
    import sparkdist
    return sparkdist.MARK, os.getppid()

def server(agent):
    return support.parents().get(agent)

spark = driving.session() if sys.argv[2] == "spark" else None
told = []
for text in ("one", "two", "one"):
    folder = Path(sys.argv[1], text)
    if not folder.exists():
        shutil.copytree(driving.ROOT / "sparkdist", folder / "sparkdist")
        with (folder / "sparkdist/__init__.py").open("a") as file:
            file.write(f"\\nMARK = {text!r}\\n")
    sys.path.insert(0, str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == "sparkdist"]:
        del sys.modules[name]
    import sparkdist
    run = sparkdist.Launcher("plain", num_processes=2, local_mode=spark is None, timeout=60)
    told.append([value[0] for value in run.launch(mark).values])
print(json.dumps(told))
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["spark", "local"])
def test_another_version_of_sparkdist_in_the_same_session(tmp_path: Path, clean: None, place: str):
    said = drive(ANOTHER, tmp_path, place)
    assert said.splitlines()[-1] == '[["one", "one"], ["two", "two"], ["one", "one"]]'
