"""What one Spark task of a gang does. It raises only to end the gang: failures travel as rows, like values.

A Spark Python worker is reused only if its task consumed its input and raised nothing, and one
task that raises loses the rows of all.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyspark
from pyspark import BarrierTaskContext, SparkFiles

from sparkdist import wire
from sparkdist.executor import packages, process, topology
from sparkdist.executor.checks import installed_version
from sparkdist.executor.last_words import GangLost
from sparkdist.executor.leader import FAILED, Row, Site, lead
from sparkdist.executor.order import Host, NodeError, Order
from sparkdist.executor.shortage import shortage
from sparkdist.executor.topology import Node

_KNOCK = 0.02  # s between a follower's attempts to find its leader


def run_task(order_json: str, function: bytes, parcel: bytes, root: str) -> Iterator[Row]:
    """Leads this executor's ranks if this is its lowest task, else waits for the one that does.

    Args:
        order_json: The `Order`.
        function: The pickled function and its arguments; empty for a script.
        parcel: A zip of what travels with the job.
        root: Folder that holds the sparkdist package.

    Yields:
        One row that says that this task was there, and those of the ranks it leads.
    """
    order = Order.from_json(order_json)
    context = BarrierTaskContext.get()
    partition = context.partitionId()
    try:
        addresses = [info.address for info in context.getTaskInfos()]
        gang = topology.nodes(addresses, order.world_size, order.processes_per_task)
        node = next(node for node in gang if partition in node.tasks)
        if partition == node.leader:
            yield from _lead(context, order, node, root, function, parcel)
        else:
            _follow(context, order, node)
    except GangLost:
        raise
    except BaseException as error:
        text = str(error) if isinstance(error, NodeError) else shortage(error)
        text = text or f"the task failed:\n{traceback.format_exc()}"
        row = {"kind": "error", "message": text}, b""
        if order.tasks > 1:
            raise GangLost([row]) from error
        yield row
    yield {"kind": "task", "partition": partition}, b""


def _lead(
    context: BarrierTaskContext, order: Order, node: Node, root: str, function: bytes, parcel: bytes
) -> list[Row]:
    """Runs this executor's ranks.

    Raises:
        GangLost: They failed and other nodes cannot be told but by Spark.
        NodeError: They could not be started.
    """
    with _Followers(context, order, node) as followers:
        site = _site(order, root)
        if order.gpus_per_task:
            site = replace(site, environ=_gpu_environ(order, [_gpus(context), *followers.gpus()]))
        rows = lead(order, node, site, function, parcel, gather=followers.gather)
    if node.count > 1 and any(row["kind"] in FAILED and row["untold"] for row, _ in rows):
        raise GangLost(rows)
    return rows


def _gpus(context: BarrierTaskContext) -> list[str]:
    """Returns the addresses of the GPUs that Spark gave this task."""
    resource = context.resources().get("gpu")
    return list(resource.addresses) if resource else []


def _gpu_environ(order: Order, by_task: list[list[str]]) -> dict[str, str]:
    """Returns what lets the node's ranks see the GPUs of all its tasks, each its own by LOCAL_RANK."""
    if any(len(gpus) != order.gpus_per_task for gpus in by_task):
        raise NodeError(
            f"on {socket.gethostname()} Spark gave tasks the GPUs {by_task}, where each should have "
            f"{order.gpus_per_task}: see what the executors' GPU discovery script prints"
        )
    addresses = [address for gpus in by_task for address in gpus]
    try:
        devices = topology.visible_devices(addresses, os.environ.get("CUDA_VISIBLE_DEVICES"))
    except ValueError as error:
        raise NodeError(f"on {socket.gethostname()}: {error}") from error
    return {"CUDA_VISIBLE_DEVICES": devices}


def _site(order: Order, root: str) -> Site:
    path = tuple(os.path.abspath(entry) for entry in sys.path if entry != root)
    host = order.host or Host(base=str(Path(root).parent), root=root, pid=os.getppid())
    return Site(
        root=host.root,
        base=Path(host.base),
        parent=host.pid,
        lifeline=Path(os.environ.get("SPARK_LOCAL_DIRS", host.base).split(",")[0]),
        sys_path=path,
        cwd=os.getcwd(),
        start_environ=_without_zipped_pyspark(),
        packages=packages.folder_of(order.packages, Path(SparkFiles.getRootDirectory()).absolute()),
        pyspark=tuple(os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p),
    )


def _without_zipped_pyspark() -> dict[str, str]:
    """Lets a forkserver import an installed pyspark: from Spark's zip that takes a second longer."""
    if installed_version("pyspark") != pyspark.__version__:
        return {}
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {"PYTHONPATH": os.pathsep.join(p for p in path if os.path.basename(p) != "pyspark.zip")}


class _Followers:
    """The executor's other tasks, which hold their slots until their leader is done."""

    def __init__(self, context: BarrierTaskContext, order: Order, node: Node) -> None:
        self._context = context
        self._count = len(node.tasks) - 1
        self._met: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(_meeting_point(order, node))
        self._listener.listen(self._count)

    def meet(self) -> list[socket.socket]:
        """Waits for each of them to have come."""
        while len(self._met) < self._count:
            follower = self._listener.accept()[0]
            if process.user_of(follower) == os.geteuid():
                self._met.append(follower)
            else:
                follower.close()  # the socket's name can be read by anybody on this host
        return self._met

    def gpus(self) -> list[list[str]]:
        """Returns the GPUs of each of them, in the order of their partitions."""
        told = [frame[0] for follower in self.meet() if (frame := wire.receive(follower, max_body=0))]
        return [header["gpus"] for header in sorted(told, key=lambda header: header["partition"])]

    def gather(self, told: str) -> str:
        """Tells all tasks of the gang something; returns what the first has told. All have to take part."""
        for follower in self.meet():
            wire.send(follower, {"kind": "gather"})
        return self._context.allGather(told)[0]

    def __enter__(self) -> _Followers:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        """Lets them go; one that would come later would find nobody, but Spark ends it after an error."""
        with self._listener:
            for follower in self.meet() if kind is None else self._met:
                follower.close()


def _follow(context: BarrierTaskContext, order: Order, node: Node) -> None:
    """Waits until this executor's leader is done."""
    with socket.socket(socket.AF_UNIX) as sock:
        while True:
            try:
                sock.connect(_meeting_point(order, node))
                break
            except (ConnectionRefusedError, BlockingIOError):
                time.sleep(_KNOCK)  # it is still starting; if it was killed, Spark ends this task too
        try:
            wire.send(sock, {"partition": context.partitionId(), "gpus": _gpus(context)})
            while wire.receive(sock, max_body=0):
                context.allGather()
        except (BrokenPipeError, ConnectionResetError):
            pass  # it closed before it had accepted: that too means done


def _meeting_point(order: Order, node: Node) -> str:
    """Returns an abstract socket address: it needs no folder and vanishes with its socket."""
    secret = f"{order.token}/{order.attempt}/{node.index}"  # so that nobody else can guess it
    return f"\0sparkdist-{hashlib.sha256(secret.encode()).hexdigest()[:32]}"
