"""The warm forkserver: who starts it, whom it serves, and what ends it. Every one here is a real process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, cast

import pytest

from sparkdist import values, wire
from sparkdist.executor import warm
from sparkdist.executor.topology import Node
from tests import orders, support

ROOT = str(Path(__file__).parents[2])
SOON = 5.0  # s; a server looks at what it depends on once a second
PICKLES = "pyspark.cloudpickle"


class Home:
    """Where a test's servers live, and the process that they end with."""

    def __init__(self, folder: Path, parent: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self.base = folder / "base"
        self.modules = folder / "modules"
        self.tmp = folder / "tmp"
        self.parent = parent
        self._before = marked()
        self.base.mkdir()
        self.modules.mkdir()
        self.tmp.mkdir()

    def servers(self) -> set[int]:
        """Every process of this test's servers."""
        return marked() - self._before

    def end(self):
        """Ends the process that servers end with; says whether they did."""
        self.parent.kill()
        self.parent.wait()
        return support.wait_until(lambda: not self.servers(), SOON)

    def kind(self, *preload, idle=(), environ=None, timeout=600.0) -> warm.Kind:
        return warm.Kind(
            root=ROOT,
            preload=preload,
            preload_idle=idle,
            distribution=None,
            environ=environ or {},
            parent=self.parent.pid,
            idle_timeout=timeout,
        )

    def module(self, name, text):
        (self.modules / f"{name}.py").write_text(text)

    def connect(self, kind, base=None, lifeline=None):
        """Connects to an agent-to-be."""
        environ = {**os.environ, "PYTHONPATH": str(self.modules), "TMPDIR": str(self.tmp)}
        conn = warm.connect(kind, base or self.base, environ, lifeline)
        conn.settimeout(30)
        return conn

    def agent(self, kind, base=None, lifeline=None):
        """Connects to an agent that has been forked."""
        conn = self.connect(kind, base, lifeline)
        answer = wire.receive(conn, max_body=0)
        assert answer and answer[0] == {"kind": "started"}
        return conn

    def call(self, kind, function, *args, base=None):
        """Runs a function in a rank and returns its value."""
        with self.agent(kind, base) as conn:
            return call(conn, self, function, *args)

    def server_folder(self, kind):
        return self.base / f"sparkdist-fork-{kind.key()}"


def call(conn, home, function, *args):
    """Does what a task does: has one rank run a function, and takes its outcome."""
    order(conn, home, function, *args)
    answer, end = wire.receive(conn, max_body=1 << 20), wire.receive(conn, max_body=0)
    assert answer is not None and end is not None
    header, body = answer
    assert (header["kind"], end[0]) == ("row", {"kind": "done"}), header
    assert header["row"]["kind"] == "returned", header
    return values.loads(body)


def order(conn, home, function, *args):
    """Tells an agent of a run of one rank."""
    message = {
        "order": orders.plain(1).to_json(),
        "node": asdict(Node(0, (0,), (1,))),
        "environ": dict(os.environ),
        "sys_path": [str(home.modules), *sys.path],
        "cwd": str(home.folder),
        "root": ROOT,
    }
    wire.send(conn, message)
    wire.send(conn, {"kind": "function"}, values.dumps((function, args, {})))
    wire.send(conn, {"kind": "parcel"})


@pytest.fixture
def home(tmp_path):
    """A place for servers; all of them must be gone soon after the process they belong to."""
    place = Home(tmp_path, subprocess.Popen(["sleep", "1000"]))
    yield place
    assert place.end(), support.describe(place.servers())
    assert list(tmp_path.rglob("sparkdist-fork-*/socket")) == []
    assert list(place.tmp.iterdir()) == []


def marked() -> set[int]:
    """Every live process of any forkserver."""
    found = support.session_processes().items()
    return {pid for pid, environ in found if support.FORKSERVER_MARKER in environ}


def processes(kind) -> set[int]:
    """A kind's servers and what is below them."""
    environs = support.session_processes()
    return {pid for pid, environ in environs.items() if environ.get(support.FORKSERVER_MARKER) == kind.key()}


def server(kind) -> int:
    """The one server of a kind that listens."""
    (pid,) = support.forkservers() & processes(kind)
    return pid


def gone(kind) -> bool:
    return support.wait_until(lambda: not processes(kind), SOON)


def modules(*names):
    return [name in sys.modules for name in names]


def server_of_me():
    """The server above a rank: its agent's parent."""
    fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1])


# --- one server, however it comes to life -------------------------------------------------------

RACER = """
import os, sys
sys.path[0] = {root!r}
from pathlib import Path
from sparkdist import wire
from sparkdist.executor import warm
kind = warm.Kind(
    root={root!r}, preload=("slow",), preload_idle=(), distribution=None, environ={{}},
    parent={parent}, idle_timeout=600.0,
)
print("ready", flush=True)
sys.stdin.readline()
conn = warm.connect(kind, Path({base!r}), os.environ)
print("connected", flush=True)
answer = wire.receive(conn, max_body=0)
print(answer and answer[0]["kind"], flush=True)
sys.stdin.readline()
"""

# Imported for as long as a file is missing, though not for ever.
SLOW = """
import os, time
deadline = time.monotonic() + 60
while not os.path.exists({path!r}) and time.monotonic() < deadline:
    time.sleep(0.01)
"""


def waiting() -> set[int]:
    """The processes that wait for somebody's lock."""
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return {int(fields[5]) for fields in lines if fields[1] == "->"}


def test_of_twenty_racing_starters_one_wins_and_all_are_connected(home):
    go = home.folder / "go"
    home.module("slow", SLOW.format(path=str(go)))
    code = RACER.format(root=ROOT, parent=home.parent.pid, base=str(home.base))
    environ = {**os.environ, "PYTHONPATH": str(home.modules)}
    pipe = subprocess.PIPE
    racers = [
        subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True, env=environ)
        for _ in range(20)
    ]

    def all_say():
        return {cast(IO[str], racer.stdout).readline().strip() for racer in racers}

    def tell_all():
        for racer in racers:
            stdin = cast(IO[str], racer.stdin)
            stdin.write("\n")
            stdin.flush()

    kind = home.kind("slow")
    folder = home.server_folder(kind)
    folder.mkdir(mode=0o700)
    try:
        assert all_say() == {"ready"}
        with warm.locked(folder):
            tell_all()
            assert support.wait_until(lambda: waiting() >= {racer.pid for racer in racers}, 30)
        assert all_say() == {"connected"}  # while the import goes on
        assert not go.exists()
        go.touch()
        assert all_say() == {"started"}
        one = server(kind)
        assert support.descendants([one]) == processes(kind) - {one}
        assert len(support.descendants([one])) == 20  # an agent for each
        tell_all()
        for racer in racers:
            assert racer.wait(timeout=30) == 0
        assert support.wait_until(lambda: processes(kind) == {one}, SOON)
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()


def test_the_next_run_finds_the_same_server_with_its_imports(home):
    home.module("kept", "import os\nwhere = os.getpid()\n")
    kind = home.kind(PICKLES, "kept")

    def where():
        return import_module("kept").where, server_of_me()

    first, second = home.call(kind, where), home.call(kind, where)
    assert first == second == (server(kind), server(kind))


def test_each_kind_has_its_own_and_they_live_side_by_side(home):
    home.module("other", "")
    kinds = [
        home.kind(PICKLES),
        home.kind(PICKLES, "other"),
        home.kind(PICKLES, environ={"PYTHONHASHSEED": "1"}),
        home.kind(PICKLES, environ={"PYTHONHASHSEED": "2"}),
    ]
    assert len({kind.key() for kind in kinds}) == len(kinds)

    def facts():
        return server_of_me(), hash("a word"), sys.modules.get("other") is not None

    held = [home.agent(kind) for kind in kinds]
    told = [call(conn, home, facts) for conn in held]
    again = [home.call(kind, facts) for kind in reversed(kinds)]
    for conn in held:
        conn.close()
    assert [pid for pid, _, _ in told] == [server(kind) for kind in kinds]
    assert len({pid for pid, _, _ in told}) == len(kinds)
    assert [loaded for _, _, loaded in told] == [False, True, False, False]
    assert told[2][1] != told[3][1]
    assert list(reversed(again)) == told


def test_what_a_kind_is_made_of_tells_it_from_others(home):
    plain = home.kind(PICKLES)
    assert plain.key() == home.kind(PICKLES).key()
    others = [
        home.kind(),
        home.kind(PICKLES, idle=("this",)),
        home.kind(PICKLES, timeout=1.0),
        home.kind(PICKLES, environ={"TORCH_LOGS": "all"}),
        warm.Kind(**{**vars(plain), "root": "/elsewhere"}),
        warm.Kind(**{**vars(plain), "parent": os.getpid()}),
        warm.Kind(**{**vars(plain), "distribution": "pytest"}),
    ]
    assert len({kind.key() for kind in [plain, *others]}) == 1 + len(others)


# --- what ends it -------------------------------------------------------------------------------


def test_it_ends_when_its_folder_is_removed(home):
    kind = home.kind(PICKLES)
    home.call(kind, modules)
    shutil.rmtree(home.server_folder(kind))
    assert gone(kind)
    assert home.call(kind, server_of_me) == server(kind)  # a new one


def test_it_ends_when_all_above_its_folder_is_removed(home):
    kind = home.kind(PICKLES)
    home.call(kind, modules)
    shutil.rmtree(home.base)
    assert gone(kind)


def test_it_ends_with_its_parent_and_so_does_a_run(home):
    kind = home.kind(PICKLES)
    folder = home.server_folder(kind)
    with home.agent(kind) as conn:
        assert len(home.servers()) == 2
        assert home.end()
        assert wire.receive(conn, max_body=0) is None
    assert not folder.exists()


def test_it_does_not_start_for_a_parent_that_has_ended_meanwhile(home):
    kind = home.kind("slow")
    go = home.folder / "go"
    home.module("slow", SLOW.format(path=str(go)))
    folder = home.server_folder(kind)
    with home.connect(kind) as conn:
        home.parent.kill()
        home.parent.wait()
        go.touch()
        with pytest.raises(ConnectionResetError):
            conn.recv(1)
    assert home.end()
    assert not folder.exists()


def test_it_ends_with_any_of_its_lifelines(home):
    kind = home.kind(PICKLES)
    lifelines = [home.folder / "one", home.folder / "two"]
    for lifeline in [*lifelines, *lifelines]:
        lifeline.mkdir(exist_ok=True)
        home.agent(kind, lifeline=lifeline).close()
    one = server(kind)
    assert processes(kind) >= {one}
    lifelines[1].rmdir()
    assert gone(kind)
    assert not home.server_folder(kind).exists()


def test_it_ends_when_nothing_came_for_long_and_removes_its_folder(home):
    kind = home.kind(PICKLES, timeout=0.2)
    assert home.call(kind, modules) == []
    folder = home.server_folder(kind)
    assert gone(kind)
    assert not folder.exists()
    assert home.call(kind, modules) == []  # the next one starts another


def test_it_is_not_idle_while_a_run_is_on(home):
    kind = home.kind(PICKLES, timeout=0.2)
    with home.agent(kind) as conn:
        pid = server(kind)
        # It looks once a second: give it two looks.
        looked = time.monotonic() + 2
        assert support.wait_until(lambda: time.monotonic() > looked or not processes(kind), 5)
        assert call(conn, home, server_of_me) == pid
    assert gone(kind)


def test_a_killed_one_is_replaced(home):
    kind = home.kind(PICKLES)
    first = home.call(kind, server_of_me)
    os.kill(first, signal.SIGKILL)
    assert support.wait_until(lambda: first not in support.parents(), SOON)
    second = home.call(kind, server_of_me)
    assert second == server(kind) != first


# --- where it cannot have a folder --------------------------------------------------------------


def test_without_a_folder_it_serves_one_run(home):
    base = home.folder / "a file"
    base.touch()
    kind = home.kind(PICKLES)
    with home.agent(kind, base) as first, home.agent(kind, base) as second:
        pids = [call(conn, home, server_of_me) for conn in (first, second)]
    assert len(set(pids)) == 2
    assert support.forkservers() & processes(kind) == set()
    assert gone(kind)  # with its run, not with its parent


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir], ids=["a file", "open to others"])
def test_a_folder_that_is_not_its_own_is_not_used(home, make: Callable[[Path], None]):
    kind = home.kind(PICKLES)
    make(home.server_folder(kind))
    home.server_folder(kind).chmod(0o755)
    assert home.call(kind, modules, "pyspark.cloudpickle") == [True]
    assert gone(kind)
    assert not (home.server_folder(kind) / "socket").exists()


def test_a_folder_that_is_a_link_is_not_used(home):
    kind = home.kind(PICKLES)
    target = home.folder / "target"
    target.mkdir(mode=0o700)
    home.server_folder(kind).symlink_to(target)
    home.call(kind, modules)
    assert gone(kind)
    assert list(target.iterdir()) == []


def test_a_folder_longer_than_a_sockets_path(home):
    base = home.base.joinpath(*["long" * 10] * 4)
    base.mkdir(parents=True)
    assert len(str(base)) > 150
    kind = home.kind(PICKLES)
    assert home.call(kind, server_of_me, base=base) == home.call(kind, server_of_me, base=base)
    assert server(kind)


def test_only_its_user_may_enter_its_folder(home):
    kind = home.kind(PICKLES)
    old = os.umask(0)
    try:
        home.call(kind, modules)
    finally:
        os.umask(old)
    folder = home.server_folder(kind)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "lock").stat().st_mode & 0o777 == 0o600


# --- what it imports ----------------------------------------------------------------------------


def test_a_failed_import_is_answered_and_tried_anew_by_the_next_run(home):
    kind = home.kind(PICKLES, "wanted_module")
    with home.connect(kind) as conn:
        answer = wire.receive(conn, max_body=0)
    assert answer and answer[0]["kind"] == "error"
    message = answer[0]["message"]
    assert "import wanted_module failed" in message and "ModuleNotFoundError" in message
    assert sys.executable in message and "PYSPARK_PYTHON" in message
    assert gone(kind)
    home.module("wanted_module", "")
    assert home.call(kind, modules, "wanted_module") == [True]


def test_who_only_warms_up_does_not_take_the_answer_from_the_next(home):
    go = home.folder / "go"
    home.module("slow", f"{SLOW.format(path=str(go))}\n1 / 0")
    kind = home.kind("slow")
    home.connect(kind).close()
    with home.connect(kind) as conn:
        go.touch()
        answer = wire.receive(conn, max_body=0)
    assert answer and "ZeroDivisionError" in answer[0]["message"]


def test_a_lifeline_that_is_gone_already_ends_nobody(home):
    missing = home.folder / "cleaned away"
    with home.agent(home.kind(PICKLES), lifeline=missing) as conn:
        assert not list(home.server_folder(home.kind(PICKLES)).glob(f"{warm.LIFELINE}*"))
        assert conn.fileno() >= 0


@pytest.mark.parametrize("text", ["1 / 0", "raise SystemExit(3)", "raise KeyboardInterrupt"])
def test_an_import_that_raises_anything_is_answered(home, text):
    home.module("broken_module", text)
    with home.connect(home.kind("broken_module")) as conn:
        answer = wire.receive(conn, max_body=0)
    assert answer and answer[0]["kind"] == "error"
    assert "import broken_module failed" in answer[0]["message"]


THREADED = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


def test_one_that_would_fork_with_threads_starts_over_without_the_import(home):
    home.module("threaded", THREADED)
    kind = home.kind("threaded")

    def facts():
        before = "threaded" in sys.modules
        import_module("threaded")
        return before, threading.active_count(), server_of_me()

    # The rank imports it by itself, with its thread.
    first, second = home.call(kind, facts), home.call(kind, facts)
    assert first == second == (False, first[1], server(kind))
    assert first[1] >= 2
    assert len(os.listdir(f"/proc/{server(kind)}/task")) == 1


def test_what_no_start_waits_for_is_imported_when_idle(home):
    witness = home.folder / "imported"
    home.module("later", f"open({str(witness)!r}, 'w')\n")
    kind = home.kind(PICKLES, idle=("later",))
    assert home.call(kind, modules, "later") == [False]
    assert support.wait_until(witness.exists, 10)
    pid = server(kind)
    assert home.call(kind, modules, "later") == [True]
    assert server(kind) == pid


@pytest.mark.parametrize("text", ["1 / 0\n", THREADED], ids=["fails", "starts a thread"])
def test_an_idle_import_that_does_not_do_is_done_without(home, text):
    witness = home.folder / "imported"
    home.module("later", f"open({str(witness)!r}, 'w')\n{text}")
    kind = home.kind(PICKLES, idle=("later",))
    home.agent(kind).close()
    assert support.wait_until(witness.exists, 10)
    assert home.call(kind, modules, "later", PICKLES) == [False, True]
    assert len(os.listdir(f"/proc/{server(kind)}/task")) == 1


# --- what its runs leave ------------------------------------------------------------------------


def leave_daemons():
    """Leaves processes behind that have left this one's session and family."""
    ours, theirs = os.pipe()
    for _ in range(3):
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                if os.fork() == 0:
                    os.write(theirs, b"%d " % os.getpid())
                    signal.pause()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    text = b""
    while text.count(b" ") < 3:
        text += os.read(ours, 100)
    return [int(pid) for pid in text.split()]


def all_dead(pids: list[int]) -> bool:
    return support.parents().keys().isdisjoint(pids)


def children(parent: int) -> list[int]:
    """The children of a process, dead ones that nobody reaped included."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent:
                found.append(int(name))
    return found


def test_daemons_die_with_their_run_and_no_zombies_pile_up(home):
    kind = home.kind(PICKLES)
    for _ in range(3):
        pids = home.call(kind, leave_daemons)
        assert len(pids) == 3
        assert support.wait_until(partial(all_dead, pids), SOON)
    assert support.wait_until(lambda: children(server(kind)) == [], SOON)
    assert processes(kind) == {server(kind)}


def test_a_run_whose_agent_is_killed_leaves_nothing_either(home):
    kind = home.kind(PICKLES)

    def kill_my_agent():
        leave_daemons()
        os.kill(os.getppid(), signal.SIGKILL)
        signal.pause()

    with home.agent(kind) as conn:
        order(conn, home, kill_my_agent)
        assert wire.receive(conn, max_body=0) is None
    assert support.wait_until(lambda: processes(kind) == {server(kind)}, SOON)
    assert support.wait_until(lambda: children(server(kind)) == [], SOON)
    assert home.call(kind, server_of_me) == server(kind)


def test_runs_side_by_side_do_not_end_each_other(home):
    kind = home.kind(PICKLES)
    with home.agent(kind) as longer:
        for _ in range(3):
            home.call(kind, leave_daemons)
        assert support.wait_until(lambda: len(children(server(kind))) == 1, SOON)
        assert call(longer, home, server_of_me) == server(kind)


def test_a_runs_folder_goes_when_the_run_does(home):
    kind = home.kind(PICKLES)
    folder = home.server_folder(kind)

    def runs():
        return list(folder.glob("run-*"))

    def is_there():
        return bool(list(Path(folder).glob("run-*")))

    assert home.call(kind, is_there) is True
    assert support.wait_until(lambda: not runs(), SOON)
    with home.agent(kind) as conn:
        assert call(conn, home, is_there) is True
    assert support.wait_until(lambda: not runs(), SOON)
    assert sorted(entry.name for entry in folder.iterdir()) == ["kept", "lock", "socket"]
    assert not list((folder / "kept").iterdir())


def test_a_task_that_is_gone_ends_its_ranks(home):
    kind = home.kind(PICKLES)
    started = home.folder / "started"

    def wait_for_ever():
        leave_daemons()
        started.touch()
        signal.pause()

    with home.agent(kind) as conn:
        order(conn, home, wait_for_ever)
        assert support.wait_until(started.exists, SOON)
        assert len(processes(kind)) >= 6
    assert support.wait_until(lambda: processes(kind) == {server(kind)}, SOON)


def test_it_keeps_no_descriptor_of_past_runs(home):
    kind = home.kind(PICKLES)
    home.call(kind, modules)

    def held():
        return sorted(os.listdir(f"/proc/{server(kind)}/fd"), key=int)

    assert support.wait_until(lambda: not children(server(kind)), SOON)
    before = held()
    for _ in range(3):
        home.call(kind, modules)
    assert support.wait_until(lambda: not children(server(kind)) and held() == before, SOON)


KILLED_DRIVER = """
import os, signal
from sparkdist import Launcher

def rank(): return os.getpid()

if __name__ == "__main__":
    Launcher("plain", local_mode=True).run(rank)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_folder_of_a_killed_driver_is_removed(tmp_path):
    environ = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    driver = subprocess.run([sys.executable, "-c", KILLED_DRIVER], env=environ, timeout=60, check=False)
    assert driver.returncode == -signal.SIGKILL
    assert support.wait_until(lambda: not list(tmp_path.iterdir()), 5)
