"""What is said of a session before a job is started. The session is real; its confs are set for a test."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparkdist import Launcher, PreflightError
from sparkdist.driver import session
from sparkdist.driver.job import BarrierJob

LEGACY = "spark.sql.legacy.setCommandRejectsSparkCoreConfs"  # or Spark refuses to set such a conf

SetConf = Callable[[str, object], None]


@pytest.fixture
def set_conf(spark) -> Iterator[SetConf]:
    names = [LEGACY]
    spark.conf.set(LEGACY, False)

    def set_conf(name: str, value: object) -> None:
        spark.conf.set(name, value)
        names.insert(0, name)

    yield set_conf
    for name in names:
        spark.conf.unset(name)


def run(function=int, **settings):
    return Launcher("plain", num_processes=2, local_mode=False, **{"timeout": 60, **settings}).run(function)


def refusal(jobs: Callable[[], int], **settings) -> str:
    """Runs what must be refused within 5 s and without a job."""
    before, began = jobs(), time.monotonic()
    with pytest.raises(PreflightError) as caught:
        run(**settings)
    assert time.monotonic() - began < 6
    assert jobs() == before
    return str(caught.value)


@pytest.fixture
def jobs(spark) -> Callable[[], int]:
    return lambda: int(spark.sparkContext._jsc.sc().dagScheduler().numTotalJobs())


def test_dynamic_allocation(set_conf, jobs):
    set_conf("spark.dynamicAllocation.enabled", True)
    assert "spark.dynamicAllocation.enabled is true" in refusal(jobs)


def test_ssl(set_conf, jobs, clean):
    set_conf("spark.ssl.enabled", True)
    assert "pytorch.spark.distributor.ignoreSsl" in refusal(jobs)
    set_conf("pytorch.spark.distributor.ignoreSsl", True)
    assert run() == 0


@pytest.mark.parametrize("conf", ["spark.network.crypto.enabled", "spark.io.encryption.enabled"])
def test_encryption_that_does_not_cover_ranks(conf, set_conf):
    set_conf(conf, True)
    with pytest.warns(UserWarning, match=conf) as warned:
        assert run() == 0
    assert len(warned) == 1


def test_no_warning_where_there_is_nothing_to_say(spark):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run() == 0


def test_a_limit_of_address_space(set_conf):
    set_conf("spark.executor.pyspark.memory", "40g")
    with pytest.warns(UserWarning, match=r"spark.executor.pyspark.memory=40g"):
        assert run() == 0


def test_gpus_of_a_local_master_would_be_waited_for_for_ever(set_conf, jobs):
    set_conf("spark.task.resource.gpu.amount", 1)
    for use_gpu in (True, False, None):
        assert "local_mode=True" in refusal(jobs, use_gpu=use_gpu)


def test_too_few_slots(spark, jobs):
    before, began = jobs(), time.monotonic()
    with pytest.raises(PreflightError, match=r"needs 3 slots at once, and the cluster \(local\[2\]\) has 2"):
        Launcher("plain", num_processes=3, local_mode=False).run(int)
    assert time.monotonic() - began < 5
    assert jobs() == before


def test_resources_that_a_local_master_does_not_have(spark, jobs):
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    profile = ResourceProfileBuilder().require(TaskResourceRequests().cpus(2)).build
    assert "resources= cannot be used on this cluster" in refusal(jobs, resources=profile)


def test_a_resource_profile_is_checked_by_its_kind():
    with pytest.raises(ValueError, match="resources must be a ResourceProfile, not a dict"):
        Launcher("plain", resources={"gpu": 1})  # type: ignore[arg-type]


def sleep_long() -> str:
    time.sleep(5)
    return "alive"


@pytest.mark.slow
@pytest.mark.parametrize("of", ["spark.sql.execution.pyspark.udf", "spark.python.worker"])
def test_the_killer_of_idle_workers_is_off_while_a_run_lasts(of, set_conf, spark, clean):
    conf = f"{of}.killOnIdleTimeout"
    if of == "spark.python.worker":  # what the application is started with: Spark reads it from here
        application = spark.sparkContext._jsc.sc().conf()
        application.set(f"{of}.idleTimeoutSeconds", "2").set(conf, "true")
    set_conf(f"{of}.idleTimeoutSeconds", 2)
    set_conf(conf, True)
    try:
        assert run(sleep_long) == "alive"
        assert spark.conf.get(conf) == "true"
        assert spark.conf.get("spark.sql.execution.pyspark.udf.killOnIdleTimeout") == "true"
    finally:
        if of == "spark.python.worker":
            application.remove(f"{of}.idleTimeoutSeconds").remove(conf)


def test_a_port_range_is_kept(spark, clean):
    def where() -> str:
        import os

        return os.environ["MASTER_PORT"]

    launcher = Launcher("torch", num_processes=2, local_mode=False, ports="29500-29540", timeout=60)
    for _ in range(2):  # a port is free again when its run is over
        assert 29500 <= int(launcher.run(where)) <= 29540


def test_no_port_is_free(spark, jobs):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = refusal(jobs, ports=str(port))
    assert f"no port of {port}-{port} is free at 127.0.0.1" in text


def test_one_port_is_too_few_for_store_and_channel_on_one_host(spark):
    with pytest.raises(PreflightError, match="store cannot listen"):
        Launcher("torch", num_processes=2, local_mode=False, ports="29555", timeout=60).run(int)


@pytest.mark.slow
def test_runs_at_once_are_all_spared_by_the_killer_of_idle_workers(set_conf, spark, clean):
    conf = "spark.sql.execution.pyspark.udf.killOnIdleTimeout"
    application = spark.sparkContext._jsc.sc().conf()
    application.set("spark.python.worker.idleTimeoutSeconds", "2")
    application.set("spark.python.worker.killOnIdleTimeout", "true")
    set_conf("spark.python.worker.idleTimeoutSeconds", 2)
    set_conf("spark.python.worker.killOnIdleTimeout", True)
    try:
        with ThreadPoolExecutor(2) as pool:
            launcher = Launcher("plain", local_mode=False, timeout=60)
            runs = [pool.submit(launcher.run, sleep_long) for _ in range(2)]
            assert [run.result() for run in runs] == ["alive", "alive"]
        assert spark.conf.get(conf) == "true"  # the application's again
    finally:
        application.remove("spark.python.worker.idleTimeoutSeconds")
        application.remove("spark.python.worker.killOnIdleTimeout")


def test_a_job_that_is_cancelled_before_it_is_submitted_never_runs(spark):
    launcher = Launcher("plain", local_mode=False)
    plan = launcher._plan(spark, launcher._pack(int, (), {}, spark), 0.0)
    job = BarrierJob(spark, session.confs(spark), plan.order, b"", b"", None)
    job.cancel()
    with ThreadPoolExecutor(1) as pool:  # a job's group stays with its thread
        assert "cancel" in str(pool.submit(job.run).exception())
