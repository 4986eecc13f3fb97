"""Whole trees of processes, described and ended. Each test has a root of its own below this process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sparkdist.executor import process
from tests import support

ROOT = Path(__file__).parents[2]

PROLOGUE = """
import json, os, signal, subprocess, sys, time
sys.path.insert(0, {root!r})
from sparkdist.executor import process

def fork(body=signal.pause, before=lambda: None):
    "Forks a process that runs body; returns its pid once it has told it."
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            before()
            os.write(theirs, b"%d\\n" % os.getpid())
            os.close(theirs)
            os.close(ours)
            body()
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as stream:
        lines = stream.read().split()
    return [int(line) for line in lines]

def fork_twice():
    "A daemon's way: the pid of a process whose parent has ended."
    def middle():
        if os.fork() > 0:
            os._exit(0)
        os.setsid()
    (pid,) = fork(before=middle)
    return pid

def alive(pid):
    try:
        return process._stat(pid)[0] not in "ZX"
    except OSError:
        return False

def tell(**facts):
    print(json.dumps(facts), flush=True)

process.become_subreaper()
"""


def run(code):
    """Runs code below a prologue in a process of its own; returns what it told."""
    program = PROLOGUE.format(root=str(ROOT)) + code
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_descendants_are_all_below_and_parents_come_first():
    told = run("""
(child,) = fork()
(leader,) = fork(before=os.setsid)
orphan = fork_twice()
ours, theirs = os.pipe()
def with_child():
    (grandchild,) = fork()
    os.write(theirs, b"%d" % grandchild)
    signal.pause()
(parent,) = fork(with_child)
grandchild = int(os.read(ours, 20))
zombie = os.fork() or os._exit(0)
os.waitid(os.P_PID, zombie, os.WEXITED | os.WNOWAIT)
found = process.descendants(os.getpid())
tell(found=found, expected=[child, leader, orphan, parent, grandchild], of_parent=process.descendants(parent))
process.end_descendants()
""")
    *_, parent, grandchild = told["expected"]
    assert sorted(told["found"]) == sorted(told["expected"])
    assert told["found"].index(parent) < told["found"].index(grandchild)
    assert told["of_parent"] == [grandchild]


def test_a_whole_tree_is_ended_at_once_and_leaves_no_zombie():
    told = run("""
deaf = lambda: [signal.signal(n, signal.SIG_IGN) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
pids = [*fork(), *fork(before=os.setsid), fork_twice(), *fork(before=deaf)]
pids += fork(lambda: (fork(before=os.setsid), signal.pause()))
(stopped,) = fork()
os.kill(stopped, signal.SIGSTOP)
shell = subprocess.Popen(["sh", "-c", "setsid sleep 1000 & sleep 1000"])
while len(process.descendants(shell.pid)) < 2:
    time.sleep(0.01)
pids += [stopped, shell.pid, *process.descendants(shell.pid)]
began = time.monotonic()
process.end_descendants()
seconds = time.monotonic() - began
try:
    os.waitpid(-1, os.WNOHANG)
    children = True
except ChildProcessError:
    children = False
tell(seconds=seconds, count=len(pids), alive=[pid for pid in pids if alive(pid)], children=children)
""")
    assert told["count"] >= 9
    assert told["alive"] == []
    assert told["children"] is False
    assert told["seconds"] < 1


def test_a_tree_that_goes_on_forking_is_ended():
    # One process more every 5 ms, and always the newest forks: it ends by itself after 400. (What
    # doubles faster than /proc can be read needs the kernel's own means, and never belongs in a test.)
    told = run("""
def run_away():
    for _ in range(400):
        if os.fork() > 0:
            signal.pause()
        os.setsid()
        time.sleep(0.005)
fork(run_away)
while len(process.descendants(os.getpid())) < 8:
    time.sleep(0.005)
process.end_descendants()
tell(left=process.descendants(os.getpid()))
""")
    assert told["left"] == []


def test_what_is_spared_lives_with_all_below_it():
    told = run("""
ours, theirs = os.pipe()
def with_child():
    (grandchild,) = fork(before=os.setsid)
    os.write(theirs, b"%d" % grandchild)
    signal.pause()
(spared,) = fork(with_child)
below = int(os.read(ours, 20))
others = [*fork(), fork_twice()]
process.end_descendants(spare=lambda pid: pid == spared)
tell(spared=[alive(spared), alive(below)], others=[alive(pid) for pid in others])
process.end_descendants()
""")
    assert told == {"spared": [True, True], "others": [False, False]}


HELPER = """
helper = '''from multiprocessing.resource_tracker import main  # by this it is known
import os, sys
os.write(int(sys.argv[2]), b"x")
os.read(int(sys.argv[1]), 1)  # the end of whoever held the other end
{last}
'''
death_r, death_w = os.pipe()
ready_r, ready_w = os.pipe()
(user,) = fork(lambda: (os.set_inheritable(death_w, False), signal.pause()))
shm = subprocess.Popen(
    [sys.executable, "-c", helper, str(death_r), str(ready_w), sys.argv[0]], pass_fds=[death_r, ready_w]
)
os.close(death_w)
os.read(ready_r, 1)
began = time.monotonic()
process.end_descendants()
tell(seconds=time.monotonic() - began, alive=[alive(user), alive(shm.pid)], cleaned=os.path.exists({path!r}))
"""


def test_helpers_of_shared_memory_come_last_and_may_clean_up(tmp_path):
    path = str(tmp_path / "cleaned")
    told = run(HELPER.format(last=f"import time; time.sleep(0.1); open({path!r}, 'w')", path=path))
    assert told["cleaned"] is True
    assert told["alive"] == [False, False]
    assert told["seconds"] < 1


def test_a_helper_that_does_not_end_is_ended(tmp_path):
    told = run(HELPER.format(last="import signal; signal.pause()", path=str(tmp_path / "never")))
    assert told["alive"] == [False, False]
    assert 0.9 < told["seconds"] < 3


def test_a_process_dies_with_its_parent():
    told = run("""
ours, theirs = os.pipe()
def parent():
    here = os.getpid()
    (child,) = fork(before=lambda: process.die_with_parent(here))
    os.write(theirs, b"%d" % child)
    signal.pause()
(pid,) = fork(parent)
child = int(os.read(ours, 20))
before = alive(child)
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
deadline = time.monotonic() + 5
while alive(child) and time.monotonic() < deadline:
    time.sleep(0.01)
late = fork(before=lambda: process.die_with_parent(-1))  # whose parent is gone already
tell(before=before, after=alive(child), late=late)
""")
    assert told == {"before": True, "after": False, "late": []}


@pytest.fixture
def sleeper():
    child = subprocess.Popen(["sleep", "1000"])
    yield child.pid
    child.kill()
    child.wait()


def letter(pid):
    return process._stat(pid)[0]


def test_start_time_tells_one_process_from_another_of_its_pid(sleeper):
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    started = process.start_time(sleeper) / os.sysconf("SC_CLK_TCK")
    assert uptime - 5 < started <= uptime
    assert process.start_time(sleeper) == process.start_time(sleeper) > process.start_time(os.getpid())
    with pytest.raises(OSError):
        process.start_time(2**22 + 1)  # above what pids go to


def test_state_says_what_a_process_does(sleeper):
    assert support.wait_until(lambda: letter(sleeper) == "S", 5)
    assert process.state(sleeper).startswith(f"process {sleeper} is asleep (kernel: ")
    os.kill(sleeper, signal.SIGSTOP)
    assert support.wait_until(lambda: letter(sleeper) == "T", 5)
    assert process.state(sleeper).startswith(f"process {sleeper} is stopped")
    assert not process.is_exiting(sleeper)
    os.kill(sleeper, signal.SIGKILL)
    os.waitid(os.P_PID, sleeper, os.WEXITED | os.WNOWAIT)
    assert process.is_exiting(sleeper)
    assert process.state(sleeper).startswith(f"process {sleeper} is a zombie")
    os.waitpid(sleeper, 0)
    assert process.is_exiting(sleeper)
    assert process.state(sleeper) == f"process {sleeper} has ended"


def test_a_name_may_hold_anything(tmp_path):
    # The kernel puts it between parentheses, and that is all the care it takes.
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/sleep")
    child = subprocess.Popen([program, "1000"])
    try:
        assert support.wait_until(lambda: b"R 1" in Path(f"/proc/{child.pid}/comm").read_bytes(), 5)
        assert child.pid in process.descendants(os.getpid())
        assert process.start_time(child.pid) > process.start_time(os.getpid())
    finally:
        child.kill()
        child.wait()


def test_memory_kills_are_counted():
    assert process.memory_kills() >= 0
    assert process.memory_kills() == process.memory_kills()


@pytest.mark.parametrize(
    "text",
    [
        "low 0\nhigh 0\nmax 12\noom 4\noom_kill 3\noom_group_kill 0\n",
        "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    ],
    ids=["cgroup v2", "cgroup v1"],
)
def test_the_kernels_counter_is_read_from_either_kind_of_cgroup(tmp_path, text):
    file = tmp_path / "events"
    file.write_text(text)
    assert process._counter(file, "oom_kill") == 3
    file.write_text("oom_kill_disable 0\n")
    assert process._counter(file, "oom_kill") is None
    assert process._counter(tmp_path / "missing", "oom_kill") is None
