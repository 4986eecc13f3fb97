"""`run` and `run_elastic`, as in horovod.spark, with real Horovod."""

from __future__ import annotations

import inspect
import io
import os
import re
import signal
import time
from typing import Any

import pytest

import sparkdist
from sparkdist import ConfigurationError, Launcher, PreflightError, TrainingFailed
from sparkdist.frameworks import Place
from sparkdist.frameworks.horovod import Horovod
from sparkdist.horovod import run, run_elastic
from tests.horovod.programs import collectives, expected, places

pytestmark = pytest.mark.usefixtures("clean")


def test_real_collectives_on_spark(spark):
    values = run(collectives, (2.0,), num_proc=2)
    assert [where for where, _ in values] == places(1, 2)
    assert all(found == expected(2, 2.0) for _, found in values)


def test_horovod_may_be_shut_down_and_started_again(spark):
    def work():
        import horovod.torch as hvd
        import torch

        sums = []
        for _ in range(5):
            hvd.init()
            sums.append(float(hvd.allreduce(torch.ones(1), op=hvd.Sum)))
            hvd.shutdown()
        return sums

    assert run(work, num_proc=2) == [[2.0] * 5] * 2


def test_a_process_set_of_some_ranks(spark):
    def work():
        import horovod.torch as hvd
        import torch

        hvd.init()
        alone = hvd.add_process_set([1])
        mine, one = 0.0, torch.ones(1)
        if hvd.rank() == 1:
            mine = float(hvd.allreduce(one, op=hvd.Sum, process_set=alone, name="mine"))
        return mine, float(hvd.allreduce(one, op=hvd.Sum, name="all"))

    assert run(work, num_proc=2, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}) == [(0.0, 2.0), (1.0, 2.0)]


def test_training_leaves_equal_weights_on_all_ranks(spark):
    def train(steps, *, rate):
        import horovod.torch as hvd
        import torch

        hvd.init()
        torch.manual_seed(hvd.rank())  # other weights, and other data, on each rank
        model = torch.nn.Linear(4, 1)
        sgd = torch.optim.SGD(model.parameters(), lr=rate * hvd.size(), momentum=0.9)
        optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        data = torch.randn(64, 4)
        target = data.sum(dim=1, keepdim=True)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(data), target)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        return [parameter.tolist() for parameter in model.parameters()], losses

    (one, losses), (other, others) = run(train, args=(60,), kwargs={"rate": 0.01}, num_proc=2)
    assert one == other
    assert losses[-1] < losses[0] / 10 and losses != others


def test_a_killed_rank_is_named_and_the_next_run_works(spark):
    def work():
        import horovod.torch as hvd
        import torch

        hvd.init()
        hvd.allreduce(torch.ones(1))
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(torch.ones(1))

    began = time.monotonic()
    with pytest.raises(TrainingFailed) as caught:
        run(work, num_proc=2, timeout=60)
    assert time.monotonic() - began < 15
    assert (caught.value.root.rank, caught.value.root.signal) == (1, "SIGKILL")
    assert run(collectives, num_proc=2)[1][1] == expected(2)


def test_an_exception_of_a_rank_is_the_cause(spark):
    def work():
        import horovod.torch as hvd
        import torch

        hvd.init()
        if hvd.rank() == 1:
            raise LookupError("no more data")
        hvd.allreduce(torch.ones(1))

    with pytest.raises(TrainingFailed, match="no more data") as caught:
        run(work, num_proc=2, timeout=60)
    assert caught.value.root.rank == 1 and isinstance(caught.value.__cause__, LookupError)


def test_without_num_proc_there_is_a_rank_for_each_slot(spark):
    slots = spark.sparkContext.defaultParallelism
    assert run(lambda: int(os.environ["HOROVOD_SIZE"])) == [slots] * slots


# --- arguments ----------------------------------------------------------------------------------


def test_the_names_are_those_of_horovod_spark(spark):
    import horovod.spark

    for ours, theirs in ((run, horovod.spark.run), (run_elastic, horovod.spark.run_elastic)):
        names, known = list(inspect.signature(theirs).parameters), inspect.signature(ours).parameters
        assert list(known)[: len(names)] == names
        for name in names:
            assert known[name].default == inspect.signature(theirs).parameters[name].default


def test_output_goes_to_the_streams_that_are_given(spark, capfd):
    def work():
        import sys

        print("to out")
        print("to err", file=sys.stderr)

    out, err = io.StringIO(), io.StringIO()
    run(work, num_proc=2, stdout=out, stderr=err, verbose=0)
    assert sorted(out.getvalue().splitlines()) == ["[rank 0] to out", "[rank 1] to out"]
    assert sorted(err.getvalue().splitlines()) == ["[rank 0] to err", "[rank 1] to err"]
    assert "rank" not in "".join(capfd.readouterr())


def test_each_line_says_when_it_came_if_wanted(spark):
    out = io.StringIO()
    run(lambda: print("a\nb"), num_proc=1, stdout=out, prefix_output_with_timestamp=True)
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
    assert re.fullmatch(rf"{stamp}\[rank 0\] a\n{stamp}\[rank 0\] b\n", out.getvalue())


def test_what_reaches_the_ranks_environment(spark, monkeypatch):
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1024")
    monkeypatch.setenv("HOROVOD_RANK", "7")  # of a driver that is a rank itself

    def ask():
        names = ("FUSION_THRESHOLD", "LOG_LEVEL", "GLOO_IFACE", "RANK")
        return [os.environ.get("MINE"), *(os.environ.get(f"HOROVOD_{name}") for name in names)]

    given = run(ask, num_proc=1, env={"MINE": "1", "HOROVOD_LOG_LEVEL": "fatal"}, verbose=2, nics={"lo"})
    assert given == [["1", "1024", "fatal", "lo", "0"]]
    assert run(ask, num_proc=1, verbose=2) == [[None, "1024", "debug", "lo", "0"]]


def test_a_launcher_may_say_it_all(spark):
    launcher = Launcher("horovod", num_processes=2, local_mode=True, env={"MINE": "1"})
    assert run(lambda: os.environ["MINE"], launcher=launcher) == ["1", "1"]
    with pytest.raises(ConfigurationError, match="num_proc=3: launcher= has num_processes=2"):
        run(collectives, num_proc=3, launcher=launcher)
    with pytest.raises(ConfigurationError, match="env: give it to the Launcher"):
        run(collectives, env={"A": "1"}, launcher=launcher)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"use_mpi": True}, "use_mpi: .*without MPI"),
        ({"extra_mpi_args": "-x"}, "extra_mpi_args: .*without MPI"),
        ({"use_gloo": False}, "use_gloo=False"),
        ({"executable": "/opt/python"}, "executable='/opt/python': .*environment="),
        ({"nics": ["eth0", "eth1"]}, "nics=.*one network interface"),
        ({"num_proc": 0}, "num_proc must be an integer of at least 1, not 0"),
        ({"num_proc": True}, "num_proc must be an integer"),
        ({"start_timeout": -1}, "start_timeout must be more than 0"),
        ({"verbose": "loud"}, "verbose must be an integer"),
        ({"stdout": "file.txt"}, "stdout must be a stream of text"),
        ({"env": {"HOROVOD_RANK": "1"}}, "HOROVOD_RANK is computed"),
        ({"no_such_setting": 1}, "unknown setting 'no_such_setting'"),
        ({"fn": "train.py"}, "fn must be a function"),
        ({"num_proc": None, "local_mode": True}, "num_proc: on the driver"),
        ({"num_proc": None, "spark": 1}, "spark must be a SparkSession"),
    ],
)
def test_what_means_nothing_here_is_refused_before_any_job(spark, wrong, words):
    with pytest.raises(ConfigurationError, match=words):
        run(**{"fn": collectives, "num_proc": 1, **wrong})


def test_what_asks_for_the_only_way_there_is_is_fine(spark):
    import sys

    given: dict[str, Any] = {
        "use_mpi": False,
        "use_gloo": True,
        "executable": sys.executable,
        "start_timeout": 60,
    }
    assert run(lambda: 1, num_proc=1, **given) == [1]


def test_the_drivers_start_timeout_is_read_and_checked(spark, monkeypatch):
    monkeypatch.setenv("HOROVOD_SPARK_START_TIMEOUT", "soon")
    with pytest.raises(ConfigurationError, match="HOROVOD_SPARK_START_TIMEOUT must be a number"):
        run(collectives, num_proc=1)


def test_too_few_slots_are_named_before_any_rank_starts(spark):
    with pytest.raises(PreflightError, match="needs 100 slots"):
        run(collectives, num_proc=100)


# --- elastic ------------------------------------------------------------------------------------


def test_an_elastic_run_starts_again_after_a_failure(spark, capsys):
    def work():
        import horovod.torch as hvd
        import torch

        hvd.init()
        attempt = sparkdist.context().attempt
        if attempt == 0 and hvd.rank() == 1:
            os._exit(3)
        return attempt, float(hvd.allreduce(torch.ones(1), op=hvd.Sum))

    assert run_elastic(work, num_proc=2, min_num_proc=1, timeout=60) == [(1, 2.0), (1, 2.0)]
    with pytest.raises(TrainingFailed) as caught:
        run_elastic(work, num_proc=2, reset_limit=0, timeout=60)
    assert caught.value.root.exit_code == 3 and len(caught.value.attempts) == 1


def test_an_elastic_run_takes_the_slots_there_are(spark):
    slots = spark.sparkContext.defaultParallelism
    work = lambda: int(os.environ["HOROVOD_SIZE"])  # noqa: E731
    assert run_elastic(work, num_proc=1, max_num_proc=slots + 2) == [slots] * slots


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_proc": 2, "min_num_proc": 3}, "num_proc=2 must be at least min_num_proc=3"),
        ({"num_proc": 2, "max_num_proc": 1}, "at most max_num_proc=1"),
        ({"num_proc": 2, "min_num_proc": 0}, "min_num_proc must be an integer of at least 1"),
        ({"num_proc": 2, "reset_limit": -1}, "reset_limit must be an integer of at least 0"),
        ({"num_proc": 2, "elastic_timeout": 0}, "elastic_timeout must be more than 0"),
    ],
)
def test_elastic_numbers_that_do_not_fit_are_refused(spark, wrong, words):
    with pytest.raises(ConfigurationError, match=words):
        run_elastic(collectives, **wrong)


def test_old_names_of_elastic_numbers_still_work(spark):
    with pytest.warns(DeprecationWarning, match="min_np is deprecated; use min_num_proc"):
        assert run_elastic(lambda: 1, num_proc=1, min_np=1) == [1]
    with pytest.warns(match="max_np"), pytest.raises(ConfigurationError, match="are the same"):
        run_elastic(lambda: 1, num_proc=1, max_np=1, max_num_proc=1)


# --- what ranks are told ------------------------------------------------------------------------


def test_places_are_numbered_as_horovodrun_numbers_them():
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts

    sizes, told = (2, 1, 3), []
    for node, size in enumerate(sizes):
        for local_rank in range(size):
            place = Place(
                rank=sum(sizes[:node]) + local_rank,
                local_rank=local_rank,
                world_size=6,
                local_sizes=sizes,
                node=node,
                run_id="r",
                attempt=0,
                max_restarts=0,
                master_addr="10.0.0.1",
                master_port=1,
                interface="eth0",
                threads=1,
                error_file="",
            )
            env = Horovod().rank_env(place)
            names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
            told.append([int(env[f"HOROVOD_{name}"]) for name in names])
    assert told == [
        [at.rank, at.size, at.local_rank, at.local_size, at.cross_rank, at.cross_size]
        for at in get_host_assignments(parse_hosts("a:2,b:1,c:3"), 6, 6)
    ]
