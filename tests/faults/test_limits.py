"""Limits that a process meets: of open files, of processes, of address space; in driver, worker and rank.

Where exactly a limit is met differs from one machine to the next. So it is raised step by step
from where nothing works to where all does: at each step a run works, or its error names the limit.
"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from sparkdist import PreflightError, ResultError
from tests import support
from tests.faults import programs
from tests.faults.driving import drive
from tests.faults.ways import Way

# --- in the driver ------------------------------------------------------------------------------

# Steps from argv[2] by argv[3] above what is in use; argv[1] names the limit.
STEPS = """
limit, steps = getattr(resource, sys.argv[1]), range(*map(int, sys.argv[2:5]))
in_use = {
    "RLIMIT_NOFILE": lambda: len(os.listdir("/proc/self/fd")),
    "RLIMIT_NPROC": lambda: driving.threads_of_user(),
}[sys.argv[1]]
_, hard = resource.getrlimit(limit)
assert driving.launch(True).values == [0, 1]
told = []
for step in steps:
    base = in_use()
    resource.setrlimit(limit, (base + step, hard))
    told.append(driving.attempt(True))
    resource.setrlimit(limit, (hard, hard))
    driving.ends_well(True)
print(json.dumps(told))
"""


def check_steps(told: list[str], limit: str) -> None:
    refused = [text for text in told if text != "works"]
    assert refused and told[0] != "works"
    assert told[-1] == "works"
    assert [text for text in refused if limit not in text] == []


def test_too_few_open_files_in_the_driver(clean: None):
    told = json.loads(drive(STEPS, "RLIMIT_NOFILE", 2, 60, 4))
    check_steps(told, "RLIMIT_NOFILE")


def test_too_few_processes(clean: None):
    """Root is not bound by that limit: another user is, who may read all the same."""
    told = json.loads(drive(STEPS, "RLIMIT_NPROC", 0, 20, 1, within=AS_USER))
    check_steps(told, "RLIMIT_NPROC")


IMPORT = """
from sparkdist import TorchDistributor

in_use = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
run = TorchDistributor(2, local_mode=True, use_gpu=False, timeout=60)
told = []
for more in (128 << 20, 384 << 20):
    resource.setrlimit(resource.RLIMIT_AS, (in_use + more, resource.RLIM_INFINITY))
    try:
        told.append(run.launch(programs.rank).values)
    except PreflightError as error:
        told.append(str(error))
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert run.launch(programs.rank).values == [0, 1]
print(json.dumps(told))
"""


def test_too_little_address_space_to_import_the_framework(clean: None):
    for text in json.loads(drive(IMPORT)):
        assert "RLIMIT_AS" in text and "Traceback" not in text


RIGHTS = "+dac_override,+dac_read_search"
AS_USER = (
    []
    if os.geteuid()
    else ["setpriv", "--reuid", "54321", "--clear-groups", "--inh-caps", RIGHTS, "--ambient-caps", RIGHTS]
)

# --- in the ranks -------------------------------------------------------------------------------


def exhaust_files() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    _ = [os.open("/dev/null", os.O_RDONLY) for _ in range(100)]


def exhaust_memory() -> int:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    return len(bytes(2 << 30))


@pytest.mark.parametrize(
    ("exhaust", "name", "limit"),
    [
        (exhaust_files, "OSError", "RLIMIT_NOFILE is 64"),
        (exhaust_memory, "MemoryError", f"RLIMIT_AS is {1 << 30}"),
    ],
)
def test_a_rank_meets_its_limit(fast: Way, exhaust: Callable[[], object], name: str, limit: str):
    error = fast.failure(programs.one_each, programs.sleep_for_ever, exhaust)
    assert (error.root.rank, error.root.type_name) == (1, name)
    assert limit in error.root.hint and limit in str(error)


def lower_and_return(name: str, soft: int) -> tuple[int, bytes]:
    import resource

    number = getattr(resource, name)
    resource.setrlimit(number, (soft, soft))
    return programs.rank(), bytes(20 << 20)


def test_a_rank_without_descriptors_returns(fast: Way):
    values = fast.launch(lower_and_return, "RLIMIT_NOFILE", 3).values
    assert [rank for rank, _ in values] == [0, 1]


def test_an_outcome_that_the_limit_of_a_files_size_forbids(fast: Way):
    with pytest.raises(ResultError, match="RLIMIT_FSIZE"):
        fast.launch(lower_and_return, "RLIMIT_FSIZE", 1 << 20)


# --- in Spark's Python workers ------------------------------------------------------------------


def python_workers() -> set[int]:
    daemons = {pid for pid in support.session_processes() if "pyspark.daemon" in support.arguments(pid)}
    found = daemons | {
        pid for pid in support.descendants(daemons) if "pyspark.daemon" in support.arguments(pid)
    }
    return found - support.forkservers() - support.run_processes()


@contextmanager
def lowered(number: int, above: int) -> Iterator[None]:
    """Lets Spark's Python workers have so much more than the most that one of them has in use."""
    workers = python_workers()
    assert workers
    before = {pid: resource.prlimit(pid, number) for pid in workers}
    used = max(len(os.listdir(f"/proc/{pid}/fd")) for pid in workers)
    for pid, (_, hard) in before.items():
        resource.prlimit(pid, number, (used + above, hard))
    try:
        yield
    finally:
        for pid in python_workers():
            resource.prlimit(pid, number, next(iter(before.values())))


@pytest.mark.parametrize("fast", ["fast-spark"], indirect=True)
def test_too_few_open_files_in_sparks_workers(fast: Way):
    fast.launch(programs.rank)
    told = []
    for above in range(4, 60, 8):
        with lowered(resource.RLIMIT_NOFILE, above):
            try:
                told.append(str(fast.launch(programs.rank).values))
            except PreflightError as error:
                told.append(str(error))
        fast.launch(programs.rank)
    assert told[-1] == "[0, 1]"
    refused = [text for text in told if text != "[0, 1]"]
    assert [text for text in refused if "RLIMIT_NOFILE" not in text] == []
