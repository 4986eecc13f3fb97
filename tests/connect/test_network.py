"""A Connect server in one network namespace, its client in another: what a user far away sees."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import support
from tests.faults.drivers import Driver, driver

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and iproute2"),
]

SERVER, CLIENT = "10.213.7.1", "10.213.7.2"
PORT = 15002


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[str, str]]:
    """Two hosts with one cable between them, as far as the network goes."""
    names = [f"sparkdist-{os.getpid()}-{i}" for i in (1, 2)]
    ends = [f"sd{os.getpid()}-{i}" for i in (1, 2)]
    with ExitStack() as cleanup:
        for name in names:
            ip("netns", "add", name)
            cleanup.callback(ip, "netns", "del", name)
        ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", ends[1], "netns", names[1])
        for name, end, address in zip(names, ends, (SERVER, CLIENT), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            for device in (end, "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield names[0], names[1]


@pytest.fixture(scope="module")
def server(namespaces: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Connect server with two slots; the name of its namespace."""
    import pyspark

    folder = tmp_path_factory.mktemp("server")
    confs = {
        "spark.driver.host": SERVER,
        "spark.driver.bindAddress": SERVER,
        "spark.connect.grpc.binding.port": PORT,
        "spark.local.dir": folder,
        "spark.sql.warehouse.dir": folder / "warehouse",
        "spark.ui.enabled": "false",
    }
    home = Path(pyspark.__file__).parent
    command = [
        "ip",
        "netns",
        "exec",
        namespaces[0],
        str(home / "bin" / "spark-submit"),
        "--master",
        "local[2]",
    ]
    for name, value in confs.items():
        command += ["--conf", f"{name}={value}"]
    command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
    environ = {**os.environ, "SPARK_HOME": str(home), "SPARK_NO_DAEMONIZE": "1"}
    environ.pop("SPARK_TESTING", None)  # it is as a user's
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=log, stderr=log, start_new_session=True
        )
    try:
        assert support.wait_until(lambda: listens(namespaces[0]) or process.poll() is not None, 90)
        assert process.poll() is None, (folder / "log").read_text()[-2000:]
        yield namespaces[0]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert support.wait_until(lambda: not support.run_processes(), 10)


def listens(namespace: str) -> bool:
    done = subprocess.run(
        ["ip", "netns", "exec", namespace, "cat", "/proc/net/tcp", "/proc/net/tcp6"],
        capture_output=True,
        text=True,
    )
    return any(f":{PORT:04X} " in line and " 0A " in line for line in done.stdout.splitlines())


@pytest.fixture(scope="module")
def client(namespaces: tuple[str, str], server: str) -> Iterator[Driver]:
    prefix = ["ip", "netns", "exec", namespaces[1]]
    with driver(f"remote=sc://{SERVER}:{PORT}", prefix=prefix) as made:
        yield made


def test_values_and_logs(client: Driver):
    assert client.does("pair", settings={"framework": "torch"})["values"] == [[0, 2.0], [1, 2.0]]
    assert {"[rank 0] summed", "[rank 1] summed"} <= set(client.printed)


def test_a_failure(client: Driver):
    said = client.does("fail")
    assert said["error"] == "TrainingFailed"
    assert said["text"].startswith("rank 1 raised ValueError: of rank 1")
    assert said["after"] < 10


def test_ctrl_c(client: Driver, tmp_path: Path):
    client.tell("wait", tmp_path)
    assert support.wait_until(lambda: {"0", "1"} <= set(os.listdir(tmp_path)), 60)
    pids = {int((tmp_path / rank).read_text()) for rank in "01"}
    interrupted = time.time()
    client.process.send_signal(signal.SIGINT)  # `ip netns exec` has become the driver
    assert support.wait_until(lambda: not pids & support.parents().keys(), 5), support.describe(pids)
    said = client.hear()
    assert said["error"] == "KeyboardInterrupt"
    assert said["at"] - interrupted < 8
    assert client.does("ranks")["values"] == [0, 1]


def test_too_few_slots(client: Driver):
    said = client.does("ranks", settings={"num_processes": 3})
    assert (said["error"], said["after"] < 8) == ("PreflightError", True)


def test_a_cut_cable(client: Driver, namespaces: tuple[str, str], tmp_path: Path):
    """The last test of the client: its session is of no use after it."""
    client.tell("wait", tmp_path, settings={"timeout": 10})
    assert support.wait_until(lambda: {"0", "1"} <= set(os.listdir(tmp_path)), 60)
    ip("-n", namespaces[1], "link", "set", f"sd{os.getpid()}-2", "down")
    said = client.hear()
    assert said["error"] in ("TrainingTimeout", "TrainingFailed")
    assert said["after"] < 40
