"""`HorovodRunner`, as in sparkdl, with real Horovod."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

import sparkdist
from sparkdist import ConfigurationError, HorovodRunner, Launcher, PreflightError, TrainingFailed
from sparkdist.horovod import log_to_driver

ROOT = Path(__file__).parents[2]


def train(*, fail: bool = False, **kwargs: Any) -> Any:
    import horovod.torch as hvd
    import torch

    hvd.init()
    if fail and hvd.rank() == 1:
        raise LookupError("no more data")
    total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum)
    print("printed")
    log_to_driver(f"sent {hvd.rank()}")
    return hvd.rank(), hvd.size(), float(total), sparkdist.context().node_rank, kwargs


def told(out: str) -> list[str]:
    return sorted(line for line in out.splitlines() if line.startswith("[rank "))


# --- how it is called ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [HorovodRunner, HorovodRunner.configure(timeout=60)])
def test_the_signature_is_sparkdls(kind):
    spec = inspect.getfullargspec(kind.__init__)
    assert (spec.args, spec.varargs, spec.varkw, spec.defaults) == (["self"], None, None, None)
    assert spec.kwonlyargs == ["np", "driver_log_verbosity"]
    assert spec.kwonlydefaults == {"driver_log_verbosity": "log_callback_only"}
    spec = inspect.getfullargspec(kind.run)
    assert (spec.args, spec.varargs, spec.varkw, spec.defaults) == (["self", "main"], None, "kwargs", None)
    assert (spec.kwonlyargs, spec.kwonlydefaults) == ([], None)
    assert kind.__name__ == "HorovodRunner" and inspect.getdoc(kind) == inspect.getdoc(HorovodRunner)
    for wrong in ((2,), ()):
        with pytest.raises(TypeError):
            kind(*wrong)


@pytest.mark.parametrize("np", [True, 2.0, "2", None, float("nan"), [2]])
def test_np_is_an_integer(np):
    with pytest.raises(ConfigurationError, match="np must be an integer"):
        HorovodRunner(np=np)


@pytest.mark.parametrize("verbosity", ["none", "ALL", None, True, ["all"]])
def test_there_are_two_verbosities(verbosity):
    with pytest.raises(ConfigurationError, match="driver_log_verbosity must be one of 'all'"):
        HorovodRunner(np=-1, driver_log_verbosity=verbosity)


@pytest.mark.parametrize("main", [None, "train.py", Path("train.py"), 7])
def test_main_is_a_function(main):
    with pytest.raises(ConfigurationError, match="main must be a function"):
        HorovodRunner(np=-1).run(main)
    with pytest.raises(TypeError):
        HorovodRunner(np=-1).run()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "wrong", [{"nothing": 1}, {"timeout": -1}, {"np": 2}, {"logs": "some"}, {"grow": True}]
)
def test_wrong_settings_are_refused_at_once(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        HorovodRunner.configure(**wrong)


def test_horovods_own_variables_are_refused():
    with pytest.raises(ConfigurationError, match="HOROVOD_RANK"):
        HorovodRunner.configure(env={"HOROVOD_RANK": "0"})(np=-1).run(train)


# --- where it runs ------------------------------------------------------------------------------


@pytest.mark.parametrize(("np", "size"), [(2, 2), (1, 1), (-2, 2), (-3, 3)])
def test_rank_0s_value_on_spark_and_on_the_driver(np, size, spark, clean):
    kwargs = {"np": 3, "self_": 1, "self": 2, "driver_log_verbosity": 4, "args": 5, "entry": 6}
    value = HorovodRunner(np=np).run(train, **kwargs)
    assert value == (0, size, size * (size + 1) / 2, 0, kwargs)


def test_main_may_be_given_by_its_name(clean):
    assert HorovodRunner(np=-1).run(main=train)[:2] == (0, 1)


def test_np_0_is_all_slots_and_deprecated(spark, clean):
    with pytest.warns(DeprecationWarning, match="np=0") as warned:
        runner = HorovodRunner(np=0)
    assert warned[0].filename == __file__
    assert runner.run(train)[:3] == (0, 2, 3.0)


def test_another_np_is_not_deprecated():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HorovodRunner(np=2)
        HorovodRunner(np=-2)


def test_more_ranks_than_slots_is_an_error_at_once(spark, clean, tmp_path):
    began = time.monotonic()
    with pytest.raises(PreflightError, match="needs 3 slots at once, and the cluster .* has 2"):
        HorovodRunner(np=3).run(lambda: (tmp_path / "started").touch())
    assert time.monotonic() - began < 2
    assert not (tmp_path / "started").exists()


def test_without_a_session_there_are_no_slots():
    code = (
        "import warnings, sparkdist\n"
        "warnings.simplefilter('ignore')\n"
        "for np in (2, 0):\n"
        "    try: sparkdist.HorovodRunner(np=np).run(print)\n"
        "    except sparkdist.PreflightError as error: print(error)\n"
    )
    assert python(code).count("needs a Spark session") == 2


# --- what it shows ------------------------------------------------------------------------------


@pytest.mark.parametrize("np", [2, -2])
@pytest.mark.parametrize("verbosity", ["all", "log_callback_only"])
def test_verbosity(np, verbosity, spark, clean, capfd):
    HorovodRunner(np=np, driver_log_verbosity=verbosity).run(train)
    sent = ["[rank 0] sent 0", "[rank 1] sent 1"]
    printed = ["[rank 0] printed", "[rank 1] printed"] if verbosity == "all" else []
    assert told(capfd.readouterr().out) == sorted(printed + sent)


def test_a_message_is_cut_at_4000_characters(clean, capfd):
    def send() -> None:
        for end in ("", "y", "yz"):
            log_to_driver("x" * 3999 + end)

    HorovodRunner(np=-1).run(send)
    whole = "[rank 0] " + "x" * 3999
    assert capfd.readouterr().out.splitlines() == [whole, whole + "y", whole + "y"]


def test_outside_of_a_rank_nobody_can_send():
    with pytest.raises(RuntimeError, match="not a rank"):
        log_to_driver("hello")


@pytest.mark.parametrize("np", [2, -2])
def test_a_timeline(np, spark, clean, tmp_path, monkeypatch):
    path = tmp_path / "timeline.json"
    monkeypatch.setenv("HOROVOD_TIMELINE", str(path))

    def reduce():
        import horovod.torch as hvd
        import torch

        hvd.init()
        hvd.allreduce(torch.ones(4), name="gradient")  # and no shutdown(), as in most programs

    HorovodRunner(np=np).run(reduce)
    events = json.loads(path.read_text())
    assert "allreduce.gradient" in [event.get("args", {}).get("name") for event in events]
    assert "NEGOTIATE_ALLREDUCE" in [event.get("name") for event in events]


# --- what goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize("np", [2, -2])
def test_an_exception_in_main_is_the_cause(np, spark, clean):
    with pytest.raises(TrainingFailed, match="rank 1 raised LookupError: no more data") as caught:
        HorovodRunner(np=np).run(train, fail=True)
    assert isinstance(caught.value.__cause__, LookupError)
    assert caught.value.root.rank == 1
    assert HorovodRunner(np=np).run(train)[:2] == (0, 2)


# --- settings of the engine ---------------------------------------------------------------------


def test_settings_of_the_engine(clean, tmp_path, capfd):
    env = {"COLOR": "red"}
    runner = HorovodRunner.configure(env=env, max_restarts=1).configure(timeout=60)
    env["COLOR"] = "blue"

    def fail_once() -> Any:
        import os

        if sparkdist.context().attempt == 0:
            raise ValueError("once")
        log_to_driver("again")
        return os.environ["COLOR"], sparkdist.context().attempt

    assert runner(np=-1).run(fail_once) == ("red", 1)
    assert told(capfd.readouterr().out) == ["[rank 0] again"]
    assert issubclass(runner, HorovodRunner)
    with pytest.raises(TrainingFailed, match="once"):  # the class itself is as it was
        HorovodRunner(np=-1).run(fail_once)


def test_configured_logs_count_before_the_verbosity(clean, capfd):
    HorovodRunner.configure(logs="rank0")(np=-2).run(train)
    assert told(capfd.readouterr().out) == ["[rank 0] printed", "[rank 0] sent 0", "[rank 1] sent 1"]


# --- what it costs to import --------------------------------------------------------------------


def python(code: str) -> str:
    command = [sys.executable, "-c", f"import sys; sys.path[0] = {str(ROOT)!r}\n{code}"]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_loads_no_framework():
    code = (
        "import sparkdist.horovod as adapter\n"
        "for name in adapter.__all__: getattr(adapter, name)\n"
        "from sparkdist import HorovodRunner\n"
        "HorovodRunner(np=2), HorovodRunner.configure(timeout=3)(np=-2)\n"
        "names = ('horovod', 'torch', 'tensorflow', 'keras', 'tf_keras', 'mxnet', 'pyspark', 'numpy')\n"
        "print([name for name in names if name in sys.modules], HorovodRunner is adapter.HorovodRunner)\n"
    )
    assert python(code) == "[] True"


def test_names_of_the_adapter():
    import sparkdist.horovod as adapter

    assert {"HorovodRunner", "LogCallback", "log_to_driver"} <= set(adapter.__all__) <= set(dir(adapter))
    with pytest.raises(AttributeError, match=r"'sparkdist\.horovod' has no attribute 'nothing'"):
        _ = adapter.nothing
    assert Launcher("horovod").framework.name == "horovod"
