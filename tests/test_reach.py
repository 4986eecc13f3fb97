"""What reaches the ranks: code from anywhere, files, variables; and that nothing else is touched."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import threading
import venv
from pathlib import Path
from typing import Any

import pytest

import sparkdist
from sparkdist import Launcher, TorchDistributor

ROOT = Path(__file__).parents[1]
# A driver of its own makes many runs, and all count as one test's setup.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run_driver(folder: Path, program: str, python: Path | None = None) -> tuple[dict[str, Any], str]:
    """Runs a driver of its own: a script in `folder/app`, started from elsewhere.

    Returns:
        What it told, and what it printed.
    """
    script, cwd, told = folder / "app/drive.py", folder / "elsewhere", folder / "told.json"
    script.parent.mkdir(exist_ok=True)
    cwd.mkdir(exist_ok=True)
    script.write_text(program)
    environ = {**os.environ, "PYSPARK_PYTHON": str(python or sys.executable), "TOLD": str(told)}
    environ.pop("PYTHONPATH", None)
    # As a user would: executors must not need to find the driver's folders, so this is no PYTHONPATH.
    command = [sys.executable, str(script), str(ROOT)]
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(told.read_text()), done.stdout


# --- executors that have everything but sparkdist -----------------------------------------------

FILES = {
    "app/helpers.py": "import helpers2\n\ndef double(x):\n    return helpers2.twice(x)\n",
    "app/helpers2.py": "def twice(x):\n    return 2 * x\n",
    "app/inside.py": "WHERE = 'imported inside'\n",
    "app/package/__init__.py": "from package.reader import read\n",
    "app/package/reader.py": """
from pathlib import Path

def read():
    return Path(__file__).with_name("data.txt").read_text()
""",
    "app/package/data.txt": "from a data file",
    "app/train/train.py": """
import json, os, sys
import beside
from shapes.square import area

if __name__ == "__main__":
    out = os.path.join(os.environ["OUT"], os.environ["RANK"])
    with open(out, "w") as file:
        json.dump([sys.argv[1:], beside.WHERE, area(3), __file__ == sys.argv[0]], file)
""",
    "app/train/beside.py": "WHERE = 'beside the script'\n",
    "app/train/shapes/__init__.py": "",
    "app/train/shapes/square.py": "def area(x):\n    return x * x\n",
    "added/one_file.py": "def where():\n    return 'a file given to addPyFile'\n",
    "added/zipped/__init__.py": "def where():\n    return 'a zip given to addPyFile'\n",
    "shipped/words.txt": "shipped words",
    "shipped/tree/deep/leaf.txt": "a leaf",
    "shipped/extra_module.py": "def where():\n    return 'shipped'\n",
}

DRIVER = """
import dataclasses, enum, functools, json, os, pathlib, sys, traceback, zipfile

sys.path.append(sys.argv[1])  # where this process, and no executor, finds sparkdist
import helpers
import package
from pyspark.sql import SparkSession
from sparkdist import Launcher, TorchDistributor, TrainingFailed, context

HERE = pathlib.Path(__file__).parents[1]
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", False)
    .config("spark.ui.showConsoleProgress", False)
    .config("spark.driver.host", "127.0.0.1")
    .getOrCreate()
)
plain = Launcher("plain", num_processes=2)
told = {}


def case(function):
    try:
        told[function.__name__] = function()
    except Exception:
        told[function.__name__] = traceback.format_exc()


def values(function, *args, **kwargs):
    return plain.launch(function, *args, **kwargs).values


# --- before anything else has run there


@case
def a_plain_task():
    def look(_):
        import importlib.util, sys

        return importlib.util.find_spec("sparkdist") is None, sys.prefix

    return spark.sparkContext.parallelize([0], 1).map(look).collect()


# --- functions

SCALE = 10


def scaled(x):
    return SCALE * x + context().rank


@case
def of_main():
    return values(scaled, 4)


@case
def from_exec():
    named, bare = {"__name__": "a_notebook"}, {}
    text = "import math\\ndef half(x): return x / 2\\ndef train(x): return math.floor(half(x))"
    exec(text, named)
    exec(text, bare)
    return values(named["train"], 9), values(bare["train"], 9)


@case
def lambdas_and_closures():
    offset, names = 5, ["a", "b"]

    def outer(x):
        def inner():
            return names[context().rank], x + offset

        return inner()

    return values(lambda x, *rest: (x, rest), 1, 2, 3), values(outer, 1)


@case
def partials():
    return values(functools.partial(functools.partial(pow, 2), mod=5), 3)


class Trainer:
    kind = "trainer"

    def __init__(self, rate):
        self.rate = rate

    def train(self, x):
        return self.rate * x

    def __call__(self, x):
        return self.kind, x

    @classmethod
    def of_class(cls):
        return cls.kind

    @staticmethod
    def of_none():
        return "static"


@case
def methods():
    trainer = Trainer(0.5)
    called = [(trainer.train, 4), (trainer, 4), (Trainer.of_class,), (Trainer.of_none,), ("a-b".split, "-")]
    return [values(*call)[1] for call in called]


# --- classes of __main__ on their way back


@dataclasses.dataclass
class Report:
    rank: int


class Color(enum.Enum):
    RED = 1


class Bad(Exception):
    def __init__(self, rank, detail):
        super().__init__(rank, detail)
        self.detail = detail


def report():
    return Report(context().rank), Color.RED


def fail():
    if context().rank == 1:
        raise Bad(1, {"loss": "nan"})
    import time
    time.sleep(60)


@case
def a_class_of_main_comes_back():
    results = values(report)
    return [
        [isinstance(found, Report), found == Report(rank), color is Color.RED]
        for rank, (found, color) in enumerate(results)
    ]


@case
def an_exception_of_main_comes_back():
    try:
        values(fail)
    except TrainingFailed as error:
        found = error.failures[1].exception
        return [isinstance(found, Bad), found.detail, error.__cause__ is found, str(error).splitlines()[0]]


# --- modules


@case
def modules_beside_the_script():
    def train(x):
        import inside

        return helpers.double(x), package.read(), inside.WHERE, inside.__file__.startswith(str(HERE))

    return values(train, 21), values(helpers.double, 4)


@case
def modules_given_to_addPyFile():
    added = HERE / "added"
    with zipfile.ZipFile(added / "zipped.zip", "w") as file:
        file.write(added / "zipped/__init__.py", "zipped/__init__.py")
    spark.sparkContext.addPyFile(str(added / "one_file.py"))
    spark.sparkContext.addPyFile(str(added / "zipped.zip"))
    import one_file

    def train():
        import one_file, zipped

        return one_file.where(), zipped.where()

    return values(train), values(one_file.where)


# --- scripts and files


def script(path, launcher="fast", *args):
    out = HERE / f"out-{launcher}-{type(path).__name__}"
    out.mkdir()
    distributor = TorchDistributor(num_processes=2, use_gpu=False, launcher=launcher, env={"OUT": str(out)})
    returned = distributor.run(path, *args)
    return [returned, *(json.loads((out / str(rank)).read_text()) for rank in range(2))]


@case
def a_script():
    # Relative to where the driver was started, which is not where its script is.
    path = os.path.relpath(HERE / "app/train/train.py")
    return script(path, "fast", "--lr=1e-3", 7, pathlib.Path("a/b"), 0.5)


@case
def a_script_by_its_path():
    return script(HERE / "app/train/train.py")


@case
def a_script_under_torchrun():
    return script(str(HERE / "app/train/train.py"), "torchrun", "--lr=1e-3", 7)


@case
def shipped_things():
    folder = HERE / "shipped"
    names = ["words.txt", "tree", "extra_module.py"]

    def train():
        import extra_module

        shipped = context().shipped
        try:
            shipped("absent")
        except FileNotFoundError as error:
            absent = str(error)
        tree = shipped("tree")
        leaf = tree / "deep/leaf.txt"
        away = not tree.is_relative_to(folder)
        return shipped("words.txt").read_text(), leaf.read_text(), extra_module.where(), away, absent

    ship = [str(folder / name) for name in names]
    return Launcher("plain", num_processes=2, ship=ship).launch(train).values


@case
def collectives():
    def add():
        import torch, torch.distributed as dist

        dist.init_process_group()
        total = torch.tensor([context().rank + 1.0])
        dist.all_reduce(total)
        dist.destroy_process_group()
        return total.item()

    return TorchDistributor(num_processes=2, use_gpu=False).launch(add).values


pathlib.Path(os.environ["TOLD"]).write_text(json.dumps(told))
spark.stop()
"""


def make_bare_python(folder: Path) -> Path:
    """Makes an environment with all that this one has installed, except what it finds through .pth files.

    Those of a folder that a .pth file names are not read; sparkdist itself is here through one, if at all.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin/python"
    variables = {"base": str(folder), "platbase": str(folder)}
    (ours,) = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    Path(sysconfig.get_path("purelib", vars=variables), "all.pth").write_text(f"{ours}\n")
    return python


@pytest.fixture(scope="module")
def reached(tmp_path_factory):
    """What a driver told whose executors have no sparkdist."""
    folder = tmp_path_factory.mktemp("reach")
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    told, _ = run_driver(folder, DRIVER, make_bare_python(folder / "bare"))
    return {"folder": folder, **told}


CASES = {
    "of_main": [40, 41],
    "from_exec": [[4, 4], [4, 4]],
    "lambdas_and_closures": [[[1, [2, 3]], [1, [2, 3]]], [["a", 6], ["b", 6]]],
    "partials": [3, 3],
    "methods": [2.0, ["trainer", 4], "trainer", "static", ["a", "b"]],
    "a_class_of_main_comes_back": [[True, True, True], [True, True, True]],
    "modules_beside_the_script": [[[42, "from a data file", "imported inside", False]] * 2, [8, 8]],
    "modules_given_to_addPyFile": [
        [["a file given to addPyFile", "a zip given to addPyFile"]] * 2,
        ["a file given to addPyFile"] * 2,
    ],
    "a_script": [None, *[[["--lr=1e-3", "7", "a/b", "0.5"], "beside the script", 9, True]] * 2],
    "a_script_by_its_path": [None, *[[[], "beside the script", 9, True]] * 2],
    "a_script_under_torchrun": [None, *[[["--lr=1e-3", "7"], "beside the script", 9, True]] * 2],
    "shipped_things": [
        ["shipped words", "a leaf", "shipped", True, "nothing named 'absent' was sent with ship="]
    ]
    * 2,
    "collectives": [3.0, 3.0],
}


def test_the_executors_have_no_sparkdist(reached):
    assert reached["a_plain_task"] == [[True, str(reached["folder"] / "bare")]]


@pytest.mark.parametrize("case", CASES)
def test_what_reaches_executors_that_have_no_sparkdist(reached, case):
    assert reached[case] == CASES[case], reached[case]


def test_an_exception_of_main_comes_back_as_what_it_is(reached):
    is_bad, detail, is_cause, head = reached["an_exception_of_main_comes_back"]
    assert (is_bad, detail, is_cause) == (True, {"loss": "nan"}, True)
    assert head.startswith("rank 1 raised ") and "Bad: (1, {'loss': 'nan'})" in head


# --- runs side by side --------------------------------------------------------------------------

SIDE_BY_SIDE = '''
import json, os, pathlib, sys, threading, time

sys.path.append(sys.argv[1])
from pyspark.sql import SparkSession
from sparkdist import Launcher, TrainingFailed, context

HERE = pathlib.Path(__file__).parents[1]
spark = (
    SparkSession.builder.master("local[4]")
    .config("spark.ui.enabled", False)
    .config("spark.ui.showConsoleProgress", False)
    .config("spark.driver.host", "127.0.0.1")
    .getOrCreate()
)
told = {}


def await_file(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"nobody made {path}"
        time.sleep(0.01)


def train(name, other, lines):
    """Trains only while the other run does."""
    rank = context().rank
    (HERE / f"{name}-{rank}").touch()
    for peer in range(2):
        await_file(HERE / f"{other}-{peer}")
    for i in range(lines):
        print(f"{name} {rank} line {i} " + 50 * name)
    return name, rank, context().world_size, context().run_id, os.environ["NAME"]


def fail(name, other):
    rank = context().rank
    (HERE / f"{name}-{rank}").touch()
    await_file(HERE / f"{other}-{rank}")
    if rank == 1:
        raise ValueError(name)
    time.sleep(60)


def outlive(name, other):
    rank = context().rank
    (HERE / f"{name}-{rank}").touch()
    await_file(HERE / f"{other}-has-failed")
    return name


def launch(name, function, *args, logs="all"):
    launcher = Launcher("plain", num_processes=2, env={"NAME": name}, logs=logs)
    try:
        results = launcher.launch(function, name, *args)
        told[name] = [results.run_id, results.values]
    except TrainingFailed as error:
        told[name] = [error.run_id, str(error.failures[1].exception)]
        (HERE / f"{name}-has-failed").touch()


def together(*runs):
    threads = [threading.Thread(target=launch, args=run, kwargs=kwargs) for *run, kwargs in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


together(("A", train, "B", 300, {}), ("B", train, "A", 300, {}))
together(("C", train, "D", 20, {"logs": "none"}), ("D", train, "C", 20, {"logs": "rank0"}))
together(("E", fail, "F", {}), ("F", outlive, "E", {}))
pathlib.Path(os.environ["TOLD"]).write_text(json.dumps(told))
spark.stop()
'''


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory):
    return run_driver(tmp_path_factory.mktemp("side"), SIDE_BY_SIDE)


def test_two_runs_at_once_mix_no_values(side_by_side):
    told, _ = side_by_side
    for name in "ABCD":
        run_id, values = told[name]
        assert values == [[name, rank, 2, run_id, name] for rank in range(2)]
    assert len({run_id for run_id, _ in told.values()}) == len(told)


def test_two_runs_at_once_mix_no_lines(side_by_side):
    _, output = side_by_side
    lines = output.splitlines()
    for name in "AB":
        for rank in range(2):
            mine = [f"[rank {rank}] {name} {rank} line {i} {50 * name}" for i in range(300)]
            assert [line for line in lines if line.startswith(f"[rank {rank}] {name} ")] == mine
    assert len([line for line in lines if " line " in line]) == 4 * 300 + 20
    assert len([line for line in lines if line.startswith("[rank 0] D 0 line")]) == 20


def test_a_failure_of_one_run_is_none_of_the_other(side_by_side):
    told, _ = side_by_side
    assert told["E"][1] == "E"
    assert told["F"][1] == ["F", "F"]


# --- variables, keywords, the context -----------------------------------------------------------


def launch(function, *args, settings=None, **kwargs):
    return Launcher("plain", num_processes=2, local_mode=False, **(settings or {})).launch(
        function, *args, **kwargs
    )


def variables(*names):
    return [os.environ.get(name) for name in names]


def test_env_beats_forward_env_beats_what_is_computed(spark, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "from-the-driver")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "from-the-driver")

    def values(**settings):
        names = "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
        distributor = TorchDistributor(2, local_mode=False, use_gpu=False, **settings)
        first, second = distributor.launch(variables, *names).values
        assert first == second
        return first

    # Spark's workers inherit what the driver had when the session was started, not what it has now.
    assert values(forward_env=[]) == ["1", "lo", "lo"]
    assert values() == ["3", "from-the-driver", "from-the-driver"]
    assert values(env={"OMP_NUM_THREADS": "5", "NCCL_SOCKET_IFNAME": "given"}) == [
        "5",
        "from-the-driver",
        "given",
    ]


def test_a_credential_reaches_ranks_by_its_own_name_only(spark, monkeypatch):
    monkeypatch.setenv("TORCH_HUB_TOKEN", "hush")
    monkeypatch.setenv("MINE_TOKEN", "hush")
    monkeypatch.setenv("MINE_LEVEL", "3")
    names = ["TORCH_HUB_TOKEN", "MINE_TOKEN", "MINE_LEVEL"]

    def values(*globs):
        settings = {"forward_env": globs} if globs else {}
        return launch(variables, *names, settings=settings).rank(1).value

    assert values() == [None, None, None]
    assert values("MINE_*", "TORCH_*") == [None, None, "3"]
    assert values("MINE_TOKEN", "MINE_LEVEL") == [None, "hush", "3"]


def test_values_of_env_may_hold_anything(spark):
    env = {"LINES": "a\nb", "EMPTY": "", "EQUALS": "a=b", "UNICODE": "å∂ß", "QUOTES": "'\"$HOME`"}
    assert launch(variables, *env, settings={"env": env}).values == [list(env.values())] * 2


def keywords(**kwargs):
    return kwargs


OURS = {
    "fn": 1,
    "self": 2,
    "timeout": 3,
    "entry": 4,
    "args": 5,
    "kwargs": 6,
    "settings": 7,
    "spark": 8,
    "env": 9,
    "function": 10,
}


@pytest.mark.parametrize("local_mode", [True, False])
def test_every_keyword_is_the_functions_own(spark, local_mode):
    kwargs = {**OURS, "train_object": 11}
    plain = Launcher("plain", num_processes=2, local_mode=local_mode)
    assert plain.run(keywords, **kwargs) == kwargs
    assert plain.launch(keywords, **kwargs).values == [kwargs, kwargs]
    torch = TorchDistributor(2, local_mode=local_mode, use_gpu=False)
    assert torch.run(keywords, **kwargs) == kwargs
    assert torch.launch(keywords, **kwargs).values == [kwargs, kwargs]


def test_a_function_given_as_train_object(spark):
    torch = TorchDistributor(2, local_mode=False, use_gpu=False)
    assert torch.run(train_object=keywords) == {}
    assert torch.launch(train_object=keywords, **OURS).values == [OURS, OURS]


@pytest.mark.parametrize("local_mode", [True, False])
def test_a_rank_knows_where_it_stands(spark, local_mode):
    def ask():
        mine = sparkdist.context()
        return vars(mine), os.environ["RANK"], mine is sparkdist.context()

    results = Launcher("plain", num_processes=2, local_mode=local_mode).launch(ask)
    for rank, (fields, variable, same) in enumerate(results.values):
        assert (variable, same) == (str(rank), True)
        assert fields == {
            "rank": rank,
            "world_size": 2,
            "local_rank": rank,
            "local_world_size": 2,
            "node_rank": 0,
            "attempt": 0,
            "run_id": results.run_id,
            "ship_folder": "",
            "kept_folder": fields["kept_folder"],
        }


def test_outside_of_a_rank_there_is_no_context(spark):
    with pytest.raises(RuntimeError, match="not a rank"):
        sparkdist.context()
    launch(keywords)
    with pytest.raises(RuntimeError, match="not a rank"):  # nor after a run
        sparkdist.context()


def test_what_results_say(spark):
    def work():
        print("training")
        return sparkdist.context().rank, sparkdist.context().run_id

    results = launch(work)
    assert results.world_size == len(results.ranks) == 2
    assert results.values == [(0, results.run_id), (1, results.run_id)]
    assert len(results.run_id) == 16 and int(results.run_id, 16) >= 0
    for rank in range(2):
        found = results.rank(rank)
        assert (found.rank, found.value, found.node) == (rank, (rank, results.run_id), 0)
        assert found.host == os.uname().nodename
        assert 0 <= found.seconds < results.timings.total
    with pytest.raises(IndexError, match="no rank 3"):
        results.rank(3)
    with pytest.raises(IndexError):
        results.rank(-1)
    (attempt,) = results.attempts
    assert (attempt.number, attempt.world_size, attempt.cause) == (0, 2, None)
    seconds = (attempt.ended - attempt.started).total_seconds()
    assert attempt.started.utcoffset() is not None
    timings = results.timings
    assert timings.slots > 0 and timings.start >= 0 and timings.training >= 0 and timings.results >= 0
    assert timings.total == pytest.approx(seconds, abs=0.2)
    assert results.run_id != launch(work).run_id


def test_rank_3_of_four_on_the_driver():
    results = Launcher("plain", num_processes=4, local_mode=True).launch(lambda: sparkdist.context().rank)
    assert (results.rank(3).value, results.world_size) == (3, 4)


# --- all is as before ---------------------------------------------------------------------------


def disturb():
    """Changes all that a rank can change of a process."""
    import numpy

    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    os.umask(0o777)
    sys.path.append("/left/behind")
    sys.argv.append("left behind")
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    random.seed(0)
    numpy.random.seed(0)
    threading.Thread(target=threading.Event().wait, daemon=True).start()


def state():
    """What a process is like, as far as a run could change it; sets of random numbers to come, too."""
    mask = os.umask(0)
    os.umask(mask)
    environ = {name: text for name, text in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    numpy = sys.modules.get("numpy")
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "pid": os.getpid(),
        "environ": environ,
        "cwd": os.getcwd(),
        "umask": mask,
        "path": list(sys.path),
        "argv": list(sys.argv),
        "handlers": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "random": random.getstate(),
        "numpy": str(numpy.random.get_state()) if numpy else "",
        "threads": status["Threads"],
        "main": vars(sys.modules["__main__"]).get("__file__"),
    }


def states_of_workers(spark):
    """The state of every Python worker of the session: a barrier holds them all at once."""

    def look(_):
        from pyspark import BarrierTaskContext

        BarrierTaskContext.get().barrier()
        return [state()]

    found = spark.sparkContext.parallelize(range(2), 2).barrier().mapPartitions(look).collect()
    return {worker["pid"]: worker for worker in found}


def test_the_driver_is_as_before(spark, clean):
    launch(keywords)
    before = state()
    for framework in ("plain", "torch"):
        for local_mode in (True, False):
            Launcher(framework, num_processes=2, local_mode=local_mode, env={"GIVEN": "1"}).launch(disturb)
    after = state()
    # Py4J keeps connections, and Spark's own helpers, for threads that once talked to the JVM.
    threads = before.pop("threads"), after.pop("threads")
    assert after == before
    assert int(threads[1]) <= int(threads[0]) + 1


def test_sparks_workers_are_used_again_and_are_as_before(spark, clean):
    launch(keywords)
    before = states_of_workers(spark)
    assert len(before) == 2
    for framework in ("plain", "torch"):
        Launcher(framework, num_processes=2, local_mode=False, env={"GIVEN": "1"}).launch(disturb)
    after = states_of_workers(spark)
    assert after.keys() == before.keys()  # the same processes
    for pid, worker in after.items():
        leaked = worker["environ"].keys() & {"RANK", "WORLD_SIZE", "MASTER_ADDR", "GIVEN", "LEFT_BEHIND"}
        assert not leaked
        assert not [name for name in worker["environ"] if name.startswith(("TORCHELASTIC", "CUDA_"))]
        assert worker == before[pid]


def test_a_failed_run_leaves_sparks_workers_as_they_were(spark, clean):
    def fail():
        disturb()
        os.kill(os.getpid(), signal.SIGKILL)

    launch(keywords)
    before = states_of_workers(spark)
    with pytest.raises(sparkdist.TrainingFailed):
        launch(fail)
    assert states_of_workers(spark) == before
