"""Executors on hosts of their own: network namespaces, joined by a bridge in the driver's.

All hosts are named as this one is, and that name may mean 127.0.0.1 to each: what no gang may meet at.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import support
from tests.cluster import clusters
from tests.cluster.clusters import Cluster, Host
from tests.cluster.test_layout import check_training
from tests.horovod.programs import expected, places

pytestmark = pytest.mark.slow

RANKS = 4
PORTS = "29500-29599"
DRIVER_ADDRESS, ADDRESSES = "10.77.0.1", ("10.77.0.2", "10.77.0.3")

# It is told a run, line by line, and says what came of it.
DRIVER = """
import json, sys, time, warnings
from sparkdist import Launcher
from tests.cluster import clusters, test_faults, test_layout
from tests.faults import programs
from tests.horovod import programs as horovod_programs

ranks, confs = int(sys.argv[1]), json.loads(sys.argv[2])
MODULES = (programs, test_faults, test_layout, horovod_programs)
spark = clusters.start_session(confs)
print("\\n@{}", flush=True)
for line in sys.stdin:
    name, args, settings = json.loads(line)
    module = next(module for module in MODULES if hasattr(module, name))
    said, began = {}, time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            framework = settings.pop("framework", "torch")
            launcher = Launcher(framework, num_processes=ranks, local_mode=False, **settings)
            results = launcher.launch(getattr(module, name), *args)
            said["values"], said["reports"] = results.values, sorted(r.rank for r in results.metrics)
        except Exception as error:
            root = getattr(error, "root", None)
            said = {"error": type(error).__name__, "text": str(error), "rank": root and root.rank}
    said |= {"seconds": time.monotonic() - began, "warnings": [str(w.message) for w in caught]}
    print("\\n@" + json.dumps(said), flush=True)
"""


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


class Network:
    """Three namespaces: the driver's, and two for executors."""

    def __init__(self) -> None:
        prefix = f"sparkdist-{uuid.uuid4().hex[:8]}"
        self.driver, *self.nodes = (f"{prefix}-{name}" for name in ("driver", "a", "b"))

    def build(self) -> None:
        for space in (self.driver, *self.nodes):
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        ip("-n", self.driver, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.driver, "addr", "add", f"{DRIVER_ADDRESS}/24", "dev", "bridge")
        ip("-n", self.driver, "link", "set", "bridge", "up")
        for index, (space, address) in enumerate(zip(self.nodes, ADDRESSES, strict=True)):
            inside, outside = f"inside-{index}", f"outside-{index}"
            ip("-n", space, "link", "add", inside, "type", "veth", "peer", outside, "netns", self.driver)
            ip("-n", space, "addr", "add", f"{address}/24", "dev", inside)
            ip("-n", space, "link", "set", inside, "up")
            ip("-n", self.driver, "link", "set", outside, "master", "bridge", "up")

    def remove(self) -> None:
        for space in (self.driver, *self.nodes):
            ip("netns", "del", space, check=False)

    @staticmethod
    def inside(space: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", space)

    @contextmanager
    def control_blocked(self, how: str, hosts: Sequence[int] = (0, 1)) -> Iterator[None]:
        """Lets executors not reach the driver's control channel, while Spark's own ports stay open.

        Args:
            how: `"prohibit"`: connecting is refused at once. `"blackhole"`: as if by a firewall.
            hosts: Which of them.
        """
        rule = ["to", DRIVER_ADDRESS, "ipproto", "tcp", "dport", PORTS, how]
        spaces = [self.nodes[host] for host in hosts]
        for space in spaces:
            ip("-n", space, "rule", "add", *rule)
        try:
            yield
        finally:
            for space in spaces:
                ip("-n", space, "rule", "del", *rule)


class Driver:
    """A driver in its namespace."""

    def __init__(self, process: subprocess.Popen[str], network: Network) -> None:
        self.process = process
        self.network = network
        self.hear()

    def launch(self, program: str, *args: Any, **settings: Any) -> dict[str, Any]:
        """Has it launch a program, by name; returns what came of it."""
        assert self.process.stdin
        order = [program, args, {"timeout": 60, "ports": PORTS, **settings}]
        print(json.dumps(order), file=self.process.stdin, flush=True)
        return self.hear()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout
        seen: list[str] = []
        for line in self.process.stdout:
            if line.startswith("@"):
                return {"output": "".join(seen), **json.loads(line[1:])}
            seen.append(line)
        raise AssertionError("the driver ended")


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    network = Network()
    try:
        try:
            network.build()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield network
    finally:
        network.remove()


@pytest.fixture(scope="module")
def driver(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """A session on a standalone cluster that spans the hosts."""
    hosts = [
        Host(address, network.inside(space)) for address, space in zip(ADDRESSES, network.nodes, strict=True)
    ]
    here = Host(DRIVER_ADDRESS, network.inside(network.driver))
    with ExitStack() as stack:
        master = stack.enter_context(clusters.standalone(tmp_path_factory.mktemp("hosts"), here, hosts))
        confs = Cluster("hosts", master, RANKS // len(hosts)).confs | {"spark.driver.host": DRIVER_ADDRESS}
        root = str(Path(__file__).parents[2])
        process = subprocess.Popen(
            [*here.before, sys.executable, "-c", DRIVER, str(RANKS), json.dumps(confs)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([root, *sys.path])},
            cwd=root,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            yield Driver(process, network)
        finally:
            process.kill()
            process.communicate()


def test_ranks_meet_on_the_gangs_interface(driver: Driver, clean: None):
    values = driver.launch("observe_sockets")["values"]
    seen = [facts for facts, _ in values]
    ((address, port),) = {(facts["MASTER_ADDR"], int(facts["MASTER_PORT"])) for facts in seen}
    assert address in ADDRESSES
    first = ADDRESSES.index(address)  # the host of node 0
    assert [facts["GROUP_RANK"] for facts in seen] == ["0", "0", "1", "1"]
    for rank, (facts, sockets) in enumerate(values):
        host = first if rank < 2 else 1 - first
        assert facts["GLOO_SOCKET_IFNAME"] == facts["NCCL_SOCKET_IFNAME"] == f"inside-{host}"
        # A network namespace shows its own sockets only: the store is node 0's.
        assert [s for s in sockets if s[1] == port] == ([[address, port]] if rank < 2 else [])
        assert ["0.0.0.0", port] not in sockets
    assert 29500 <= port < 29600


def test_training(driver: Driver, clean: None):
    ranks = list(range(RANKS))
    assert driver.launch("reduce_ranks")["values"] == [[10.0, ranks]] * RANKS
    check_training(driver.launch("train")["values"])


def test_horovod(driver: Driver, clean: None):
    said = driver.launch("collectives", framework="horovod")
    assert [where for where, _ in said["values"]] == places(len(ADDRESSES), RANKS // len(ADDRESSES)), said
    assert all(found == expected(RANKS) for _, found in said["values"])
    used = driver.launch("interface", framework="horovod")["values"]
    assert sorted(used) == ["inside-0"] * 2 + ["inside-1"] * 2


def test_the_root_failure_is_named_across_hosts(driver: Driver, clean: None, tmp_path: Path):
    for number in (0, RANKS - 1):
        said = driver.launch("fail_in_rank", number, str(tmp_path / "moment"))
        assert (said["error"], said["rank"]) == ("TrainingFailed", number), said
        assert f"[rank {number}] last words" in said["output"]
    assert driver.launch("rank")["values"] == list(range(RANKS))


# --- the control channel is blocked -------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [(0, 1), (0,), (1,)], ids=["all", "first", "second"])
@pytest.mark.parametrize("how", ["prohibit", "blackhole"])
def test_executors_that_do_not_reach_the_driver(
    driver: Driver, clean: None, tmp_path: Path, how: str, hosts: tuple[int, ...]
):
    with driver.network.control_blocked(how, hosts):
        said = driver.launch("reduce_ranks")
        assert said["values"] == [[10.0, list(range(RANKS))]] * RANKS, said
        assert len([text for text in said["warnings"] if "spark.driver.host" in text]) <= 1
        assert driver.launch("report", 3)["reports"] == [rank for rank in range(RANKS) for _ in range(3)]
        # Beside ranks that wait: in a collective Spark may hear of a peer on the other host first.
        said = driver.launch("fail_beside_sleepers", RANKS - 1)
        assert (said["error"], said["rank"]) == ("TrainingFailed", RANKS - 1), said
        assert "LookupError: the last rank" in said["text"]
        assert f"[rank {RANKS - 1}] last words" in said["output"]
        assert said["seconds"] < 30
        said = driver.launch("sleep_for_ever", timeout=15)
        assert said["error"] == "TrainingTimeout" and said["seconds"] < 40
        assert support.wait_until(lambda: not support.run_processes(), 5)
    said = driver.launch("rank")
    assert said["values"] == list(range(RANKS)) and not said["warnings"], said
