"""Code written for pyspark's TorchDistributor works after its import was changed."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyspark.ml.torch.distributor import TorchDistributor as PysparksDistributor

from sparkdist import ConfigurationError, PreflightError, TorchDistributor

ROOT = Path(__file__).parents[1]
MIGRATING = ROOT / "docs/migrating.md"
DEFAULTS = {"local_mode": (True, None), "use_gpu": (True, None)}  # pyspark's, and ours


def train(learning_rate=0.1, epochs=1, **rest):
    import os

    return os.environ["RANK"], os.environ["WORLD_SIZE"], learning_rate, epochs, rest


def parameters(function, kinds):
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.default) for p in found if p.kind in kinds and p.name != "self"]


def test_the_constructor_takes_the_same_arguments():
    kinds = [inspect.Parameter.POSITIONAL_OR_KEYWORD]
    theirs = parameters(PysparksDistributor.__init__, kinds)
    ours = parameters(TorchDistributor.__init__, kinds)
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    different = {name: (a, b) for (name, a), (_, b) in zip(theirs, ours, strict=True) if a != b}
    assert different == DEFAULTS


def test_there_are_the_same_public_methods():
    def methods(cls):
        return {name for name, value in inspect.getmembers(cls, callable) if not name.startswith("_")}

    assert methods(PysparksDistributor) <= methods(TorchDistributor)


def test_what_differs_is_documented():
    text = MIGRATING.read_text()
    for name, (theirs, ours) in DEFAULTS.items():
        assert f"| `{name}` | `{theirs}`" in text
        assert f"| `{ours}`" in text.partition(f"| `{name}` |")[2].splitlines()[0]


CONSTRUCTED = [
    ((2, True, False), {}),
    ((2, True, False, "pytorch.spark.distributor.ignoreSsl"), {}),
    ((2,), {"local_mode": True, "use_gpu": False}),
    ((), {"num_processes": 2, "local_mode": True, "use_gpu": False, "_ssl_conf": "some.conf"}),
]


@pytest.mark.parametrize(("args", "kwargs"), CONSTRUCTED)
def test_every_way_to_construct_and_train_on_the_driver(args, kwargs):
    assert TorchDistributor(*args, **kwargs).run(train) == ("0", "2", 0.1, 1, {})


CALLED = [
    ((train,), {}, (0.1, 1, {})),
    ((train, 1e-3, 64), {}, (1e-3, 64, {})),
    ((train, 1e-3), {"epochs": 3}, (1e-3, 3, {})),
    ((train,), {"learning_rate": 1e-3, "tol": 1}, (1e-3, 1, {"tol": 1})),
    ((), {"train_object": train}, (0.1, 1, {})),
    ((), {"train_object": train, "epochs": 3}, (0.1, 3, {})),
]


@pytest.mark.parametrize(("args", "kwargs", "seen"), CALLED)
def test_every_way_to_train_a_function_on_spark(spark, args, kwargs, seen):
    distributor = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)
    assert distributor.run(*args, **kwargs) == ("0", "2", *seen)


@pytest.mark.parametrize("local_mode", [True, False])
@pytest.mark.parametrize("form", ["positional", "keyword"])
def test_every_way_to_train_a_file(spark, tmp_path, local_mode, form):
    script = tmp_path / "train.py"
    script.write_text(
        "import argparse, os, pathlib\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--out')\n"
        "parser.add_argument('--batch-size', type=int, default=1)\n"
        "args = parser.parse_args()\n"
        "pathlib.Path(args.out or os.environ['OUT'], os.environ['RANK']).write_text(str(args.batch_size))\n"
    )
    distributor = TorchDistributor(2, local_mode, False, env={"OUT": str(tmp_path)})
    if form == "positional":
        assert distributor.run(str(script), f"--out={tmp_path}", "--batch-size=64") is None
    else:
        assert distributor.run(train_object=str(script)) is None
    expected = "64" if form == "positional" else "1"
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [expected, expected]


def test_spark_without_a_session_is_an_error():
    # In a process of its own: another test's session is active in this one.
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from sparkdist import TorchDistributor\n"
        "try: TorchDistributor(2, local_mode=False, use_gpu=False).run(print)\n"
        "except RuntimeError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "needs a Spark session" in done.stdout and "local_mode=True" in done.stdout


def test_ssl_is_refused_unless_the_sessions_conf_allows_it(spark):
    distributor = TorchDistributor(2, local_mode=False, use_gpu=False)
    spark.conf.set("spark.ssl.enabled", "true")
    try:
        with pytest.raises(PreflightError, match="pytorch.spark.distributor.ignoreSsl"):
            distributor.run(os.getpid)
        spark.conf.set("pytorch.spark.distributor.ignoreSsl", "true")
        assert distributor.run(os.getpid) > 0
    finally:
        spark.conf.unset("spark.ssl.enabled")
        spark.conf.unset("pytorch.spark.distributor.ignoreSsl")


def test_gpus_that_spark_does_not_offer(spark):
    with pytest.raises(ConfigurationError, match="spark.task.resource.gpu.amount"):
        TorchDistributor(2, local_mode=False, use_gpu=True).run(os.getpid)


def test_more_ranks_than_slots_is_an_error_at_once(spark):
    began = time.monotonic()
    with pytest.raises(PreflightError, match="needs 3 slots at once, and the cluster .* has 2"):
        TorchDistributor(3, local_mode=False, use_gpu=False).run(os.getpid)
    assert time.monotonic() - began < 2
