"""Return values: of any size, and those that cannot travel."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from sparkdist import ResultError
from tests.faults import programs
from tests.faults.driving import drive
from tests.faults.ways import Way

MB = 1 << 20


def result_error(way: Way, program: Any, *args: Any) -> ResultError:
    with pytest.raises(ResultError) as caught:
        way.launch(program, *args)
    assert isinstance(caught.value, RuntimeError)
    return caught.value


def test_a_value_that_does_not_pickle(lean: Way):
    error = result_error(lean, programs.value_of_rank_1, threading.Lock)
    assert (error.rank, error.type_name) == (1, "_thread.lock")
    assert str(error).startswith("rank 1 returned a _thread.lock that does not pickle (TypeError: ")


def test_a_value_that_does_not_unpickle_on_the_driver(fast: Way):
    error = result_error(fast, programs.value_of_rank_1, programs.Fragile)
    assert (error.rank, error.type_name) == (1, "tests.faults.programs.Fragile")
    assert "does not unpickle on the driver (KeyError: 'RANK')" in str(error)
    assert isinstance(error.__cause__, KeyError)


def test_a_failure_counts_before_a_value_that_does_not_pickle(fast: Way):
    error = fast.failure(programs.one_each, threading.Lock, programs.fail_on_a_rank)
    assert error.root.rank == 1


def intact(value: tuple[str, bytes], size: int) -> bool:
    digest, data = value
    return len(data) == size and hashlib.sha256(data).hexdigest() == digest


def test_large_values(lean: Way):
    values = lean.launch(programs.random_bytes, 40 * MB).values
    assert [intact(value, 40 * MB) for value in values] == [True, True]
    assert values[0] != values[1]


def test_a_very_large_value(fast: Way):
    value = fast.launch(programs.value_of_rank_1, programs.random_bytes, 300 * MB).values[1]
    assert intact(value, 300 * MB)


def test_values_around_the_limit_of_a_row(fast: Way):
    for size in (15 * MB, 16 * MB, 17 * MB):
        values = fast.launch(programs.random_bytes, size).values
        assert [intact(value, size) for value in values] == [True, True]


TOO_LARGE = """
def give(size):
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)  # not the driver's
    return bytes(size) if programs.rank() == 1 else None

assert driving.launch(True).values == [0, 1]
in_use = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (in_use + (200 << 20), resource.RLIM_INFINITY))
told = []
for size in (400 << 20, 120 << 20):  # cannot be received; can, but not be unpickled
    try:
        driving.launch(True, give, size)
    except ResultError as error:
        told.append(str(error))
    assert driving.launch(True).values == [0, 1]
driving.ends_well(True)
print(json.dumps(told))
"""


def test_a_value_for_which_the_driver_has_no_memory(clean: None):
    texts = json.loads(drive(TOO_LARGE))
    assert len(texts) == 2
    for text in texts:
        assert text.startswith("rank 1 returned a bytes that ") and "RLIMIT_AS" in text
    assert f"has {400 * MB // 1000}" in texts[0]  # and a few bytes for the pickle


# --- where executors cannot connect to the driver -----------------------------------------------

UNREACHABLE = """
from pyspark.sql import SparkSession
from sparkdist import Launcher, ResultError, TrainingFailed, TrainingTimeout
from tests import support
from tests.faults import programs

# The control channel listens on one address of loopback, and executors are told another.
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", False)
    .config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.driver.host", "127.0.0.9")
    # Spark's own large results would have to be fetched from that address.
    .config("spark.task.maxDirectResultSize", "64m")
    .getOrCreate()
)
spark.sparkContext.setLogLevel("ERROR")

def launch(program, *args, **settings):
    launcher = Launcher("plain", num_processes=2, local_mode=False, **{"timeout": 60, **settings})
    return launcher.launch(program, *args).values

def error_of(kind, program, *args, **settings):
    try:
        launch(program, *args, **settings)
    except kind as error:
        return error
    raise AssertionError("no error")

assert launch(programs.rank) == [0, 1]
small = launch(programs.random_bytes, 15 << 20)
assert len(small[0][1]) == len(small[1][1]) == 15 << 20

error = error_of(ResultError, programs.value_of_rank_1, programs.random_bytes, 20 << 20)
assert error.rank == 1
assert str(16 << 20) in str(error), error  # the limit,
size = int(str(error).split("has ")[1].split()[0])
assert 20 << 20 < size < (20 << 20) + 1000, error  # and what it was

error = error_of(TrainingFailed, programs.one_each, programs.sleep_for_ever, programs.fail_on_a_rank)
assert error.root.rank == 1 and error.root.message == "not here", error

error = error_of(TrainingTimeout, programs.sleep_for_ever, timeout=4)
assert error.setting == "timeout", error

assert support.wait_until(lambda: not support.run_processes(), 5), support.describe(support.run_processes())
assert launch(programs.rank) == [0, 1]
spark.stop()
print("all was as promised")
"""


@pytest.mark.slow
def test_where_the_driver_cannot_be_reached(clean: None):
    root = str(Path(__file__).parents[2])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])}
    command = [sys.executable, "-c", UNREACHABLE]
    done = subprocess.run(command, env=environ, cwd=root, capture_output=True, text=True, timeout=110)
    assert done.stdout.endswith("all was as promised\n"), done.stdout + done.stderr
