"""The engine keeps torchrun's contract: the real torchrun runs beside it, and ranks compare notes."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from fnmatch import fnmatchcase
from functools import partial
from itertools import product

import pytest

from sparkdist import Launcher, TorchDistributor, TrainingFailed

RANKS = 2
ARGS = ["--lr=1e-3", "two words", ""]


def observe():
    """Tells what a rank sees. Its source is a script, too: it needs nothing from around it."""
    import faulthandler
    import gc
    import locale
    import logging
    import multiprocessing
    import os
    import resource
    import signal
    import sys
    import threading
    import warnings
    from pathlib import Path

    import torch
    import torch.distributed

    main = sys.modules["__main__"]
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    masks = {name: int(status[name], 16) for name in ("SigBlk", "SigIgn")}
    # Python leaves out the two signals that libc keeps for itself.
    signals = {n: [n for n in signal.valid_signals() if mask >> (n - 1) & 1] for n, mask in masks.items()}
    streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    facts = {
        "main: __name__": main.__name__,
        "main: this function is in it": vars(main).get("observe") is not None,
        "main: has a __file__": hasattr(main, "__file__"),
        "main: is the script": getattr(main, "__file__", "") == sys.argv[0],
        "main: __spec__": main.__spec__,
        "argv[0]: file name": Path(sys.argv[0]).name,
        "argv[2:]": sys.argv[2:],
        "sys.path[0] is the script's folder": sys.path[0] == os.path.dirname(sys.argv[0]),
        "cwd": os.getcwd(),
        "umask": status["Umask"].strip(),
        "flags": str(sys.flags),
        "executable": sys.executable,
        "elastic": torch.distributed.is_torchelastic_launched(),
        "torch threads": torch.get_num_threads(),
        "torch interop threads": torch.get_num_interop_threads(),
        "start method": multiprocessing.get_start_method(),
        "process name": multiprocessing.current_process().name,
        "in the main thread": threading.current_thread() is threading.main_thread(),
        "threads": threading.active_count(),
        "gc": [gc.isenabled(), *gc.get_threshold()],
        "switch interval": sys.getswitchinterval(),
        "recursion limit": sys.getrecursionlimit(),
        "filters of warnings": [str(entry[:1] + entry[2:3]) for entry in warnings.filters],
        "root logger": [logging.root.level, len(logging.root.handlers)],
        "faulthandler": faulthandler.is_enabled(),
        "excepthook": sys.excepthook is sys.__excepthook__,
        "locale": [locale.setlocale(locale.LC_CTYPE), sys.getfilesystemencoding()],
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "cores": sorted(os.sched_getaffinity(0)),
        "stdin is at its end": os.read(0, 1) == b"",
        "signal handlers": {n: str(signal.getsignal(n)) for n in signal.valid_signals()},
        **{f"signals, {name}": numbers for name, numbers in signals.items()},
        **{f"{n}: buffers lines only": s.line_buffering for n, s in streams.items()},
        **{f"{n}: text": [s.encoding, s.errors, s.fileno()] for n, s in streams.items()},
        **{f"limit {n}": resource.getrlimit(getattr(resource, n)) for n in dir(resource) if "RLIMIT" in n},
    }
    return {"environ": dict(os.environ), "facts": facts}


def draw(with_torch):
    """Draws one of each kind of random number that a program gets without a seed."""
    import os
    import random
    import tempfile
    import uuid

    import numpy

    drawn = {
        "random": random.random(),
        "os.urandom": os.urandom(8),
        "uuid": uuid.uuid4(),
        "tempfile": tempfile.mktemp(),
        "numpy": numpy.random.rand(),
        "numpy's generator": numpy.random.default_rng().random(),
    }
    if with_torch:
        import torch

        drawn |= {"torch": torch.rand(()).item(), "torch's seed": torch.initial_seed()}
    return drawn


SCRIPT = f"""
{inspect.getsource(observe)}

if __name__ == "__main__":
    import json, os, sys
    with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
        json.dump(observe(), file)
"""

# Fails under @record, and goes on.
RECORDS = """
import os, shutil, sys
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise ValueError("boom " + os.environ["RANK"])

try:
    main()
except ValueError:
    shutil.copy(os.environ["TORCHELASTIC_ERROR_FILE"], sys.argv[1] + "/error-" + os.environ["RANK"])
"""

# Fails at first, and says each time which try it is.
TRIES = """
import os, sys
from pathlib import Path

tries = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"]
Path(sys.argv[1], "-".join((os.environ["RANK"], *tries))).touch()
sys.exit(tries[0] == "0")
"""

# Every difference from torchrun that we mean: in which runs, what, and why.
INTENDED = [
    ("*", "env GLOO_SOCKET_IFNAME", "a host whose name resolves to 127.0.0.1 would offer loopback to peers"),
    ("*", "env NCCL_SOCKET_IFNAME", "as for gloo"),
    ("*", "env SPARKDIST_*", "the run's mark in its processes"),
    ("*", "env MASTER_ADDR", "an address on the gang's network; torchrun gives the name of the host"),
    ("*", "env MASTER_PORT", "chosen anew for each run"),
    ("*", "env TORCHELASTIC_RUN_ID", "one for each run; torchrun's is `none` unless given"),
    ("*", "env TORCHELASTIC_ERROR_FILE", "in a folder of the run's own"),
    ("*", "faulthandler", "a crash in C leaves its Python stack in the rank's last lines"),
    ("*", "std*: buffers lines only", "lines reach the driver as they are printed"),
    ("*", "std*: text", "a line that does not encode is shown, and does not end a training"),
    ("*, function", "main: *", "a function travels without the module or notebook it is from"),
    ("*, function", "argv*", "nobody gave the function arguments for a command line"),
    ("*, function", "sys.path[[]0] *", "there is no script"),
    ("spark*", "env PYTHON*", "Spark's, for its Python workers"),
    ("spark*", "env SPARK_*", "Spark's, for its Python workers"),
    ("spark*", "flags", "Spark sets PYTHONHASHSEED=0"),
]

# Whoever starts a process leaves these there: pytest, a shell, readline that torchrun happens to load.
NOT_TORCHRUNS = {"PYTEST_CURRENT_TEST", "_", "LINES", "COLUMNS"}


class Runs:
    """What the ranks of each run saw, as JSON brings it; every run happens once."""

    def __init__(self, folder, spark):
        self._folder = folder
        self._spark = spark
        self._seen = {}
        self.script = folder / "probe.py"
        self.script.write_text(SCRIPT)
        # As a user's __main__ or notebook has it: pickled by value.
        namespace = {"__name__": "__main__"}
        exec(inspect.getsource(observe), namespace)
        self._function = namespace["observe"]

    def real(self):
        return self._once("real", self._real)

    def ours(self, *case):
        return self._once(", ".join(case), partial(self._ours, *case))

    def _once(self, name, run):
        if name not in self._seen:
            self._seen[name] = json.loads(json.dumps(run()))
        return self._seen[name]

    def _real(self):
        out = self._out()
        command = [
            "torch.distributed.run",
            "--nnodes=1",
            f"--nproc-per-node={RANKS}",
            self.script,
            out,
            *ARGS,
        ]
        subprocess.run([sys.executable, "-m", *map(str, command)], stdin=subprocess.DEVNULL, check=True)
        return self._read(out)

    def _ours(self, where, launcher, entry):
        distributor = TorchDistributor(RANKS, where == "driver", launcher=launcher, spark=self._spark)
        if entry == "function":
            return distributor.launch(self._function).values
        out = self._out()
        assert distributor.run(self.script, out, *ARGS) is None
        return self._read(out)

    def _out(self):
        out = self._folder / f"out-{len(self._seen)}"
        out.mkdir(exist_ok=True)
        return out

    def _read(self, out):
        return [json.loads((out / str(rank)).read_text()) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, spark):
    return Runs(tmp_path_factory.mktemp("contract"), spark)


CASES = list(product(("driver", "spark"), ("fast", "torchrun"), ("function", "script")))


def flat(seen):
    variables = {name: text for name, text in seen["environ"].items() if name not in NOT_TORCHRUNS}
    return {**{f"env {name}": text for name, text in variables.items()}, **seen["facts"]}


def differing(ours, theirs):
    """The names of all that differs, for each with both values, over all ranks."""
    found = {}
    for mine, yours in zip(map(flat, ours), map(flat, theirs), strict=True):
        for name in mine.keys() | yours.keys():
            pair = mine.get(name, "(not there)"), yours.get(name, "(not there)")
            if pair[0] != pair[1]:
                found[name] = pair
    return found


def intended(case, name):
    return [
        entry for entry in INTENDED if fnmatchcase(", ".join(case), entry[0]) and fnmatchcase(name, entry[1])
    ]


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_ranks_see_what_torchrun_shows_them(runs, case):
    found = differing(runs.ours(*case), runs.real())
    assert {name: pair for name, pair in found.items() if not intended(case, name)} == {}


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_no_variable_of_torchruns_is_missing(runs, case):
    for ours, theirs in zip(runs.ours(*case), runs.real(), strict=True):
        set_by_torchrun = theirs["environ"].keys() - os.environ.keys() - NOT_TORCHRUNS
        assert "TORCHELASTIC_USE_AGENT_STORE" in set_by_torchrun
        assert set_by_torchrun - ours["environ"].keys() == set()


def test_every_difference_listed_is_one(runs):
    used = []
    for case in CASES:
        for name in differing(runs.ours(*case), runs.real()):
            used += intended(case, name)
    assert [entry for entry in INTENDED if entry not in used] == []


@pytest.mark.parametrize("where", ["driver", "spark"])
@pytest.mark.parametrize("framework", ["torch", "plain"])
def test_ranks_and_runs_draw_different_random_numbers(spark, where, framework):
    # The second run comes from the same warm server.
    launcher = Launcher(framework, num_processes=RANKS, local_mode=where == "driver", spark=spark)
    ranks = [rank for _ in range(2) for rank in launcher.launch(draw, framework == "torch").values]
    for kind in ranks[0]:
        assert len({rank[kind] for rank in ranks}) == 2 * RANKS, kind


@pytest.mark.parametrize("launcher", ["fast", "torchrun"])
def test_record_writes_its_error_file_where_the_variable_says(tmp_path, launcher):
    script = tmp_path / "records.py"
    script.write_text(RECORDS)
    TorchDistributor(RANKS, True, launcher=launcher).run(script, tmp_path)
    for rank in range(RANKS):
        error = json.loads((tmp_path / f"error-{rank}").read_text())
        assert error["message"]["message"] == f"ValueError: boom {rank}"


def test_what_record_wrote_is_the_message_of_a_rank_that_then_exits(tmp_path):
    script = tmp_path / "records.py"
    script.write_text(RECORDS + "os._exit(3)")
    with pytest.raises(TrainingFailed) as caught:
        TorchDistributor(RANKS, True).run(script, tmp_path)
    root = caught.value.root
    assert (root.kind, root.exit_code, root.message) == ("exit", 3, f"ValueError: boom {root.rank}")


def test_restarts_are_counted_as_by_torchrun(tmp_path):
    script, ours, theirs = tmp_path / "tries.py", tmp_path / "ours", tmp_path / "theirs"
    script.write_text(TRIES)
    for folder in (ours, theirs):
        folder.mkdir()
    TorchDistributor(1, True, max_restarts=2).run(script, ours)
    command = ["torch.distributed.run", "--nproc-per-node=1", "--max-restarts=2", script, theirs]
    subprocess.run([sys.executable, "-m", *map(str, command)], stdin=subprocess.DEVNULL, check=True)
    assert sorted(os.listdir(ours)) == sorted(os.listdir(theirs)) == ["0-0-2", "0-1-2"]
