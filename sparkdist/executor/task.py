"""What one Spark task of a gang does. It never raises: failures travel as rows, like values.

A Spark Python worker is reused only if its task consumed its input and raised nothing, and one
task that raises would lose the rows of all.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pyspark
from pyspark import BarrierTaskContext, SparkFiles

from sparkdist.executor import packages, topology
from sparkdist.executor.leader import Row, Site, lead
from sparkdist.executor.link import Link, dial
from sparkdist.executor.order import Host, NodeError, Order
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
    partition = -1
    try:
        order = Order.from_json(order_json)
        context = BarrierTaskContext.get()
        partition = context.partitionId()
        addresses = [info.address for info in context.getTaskInfos()]
        gang = topology.nodes(addresses, order.world_size, order.processes_per_task)
        node = next(node for node in gang if partition in node.tasks)
        if partition == node.leader:
            with _Followers(order, node):
                yield from lead(order, node, _site(order, root), function, parcel)
        else:
            _follow(order, node)
    except NodeError as error:
        _tell_driver(order, error)
        yield {"kind": "error", "message": str(error)}, b""
    except BaseException:
        yield {"kind": "error", "message": f"the task failed:\n{traceback.format_exc()}"}, b""
    yield {"kind": "task", "partition": partition}, b""


def _tell_driver(order: Order, error: NodeError) -> None:
    """Has the other nodes stopped now: this one's rows are read when all tasks have ended."""
    link = Link(dial(order))
    link.send({"kind": "broken", "message": str(error)})
    link.close()


def _base() -> Path:
    return Path(os.environ.get("SPARK_LOCAL_DIRS", tempfile.gettempdir()).split(",")[0])


def _site(order: Order, root: str) -> Site:
    path = tuple(os.path.abspath(entry) for entry in sys.path if entry != root)
    host = order.host or Host(base=str(_base()), root=root, pid=os.getppid())
    return Site(
        root=host.root,
        base=Path(host.base),
        parent=host.pid,
        lifeline=_base(),
        sys_path=path,
        cwd=os.getcwd(),
        start_environ=_without_zipped_pyspark(),
        packages=packages.folder_of(order.packages, Path(SparkFiles.getRootDirectory()).absolute()),
        pyspark=tuple(os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p),
    )


def _without_zipped_pyspark() -> dict[str, str]:
    """Lets a forkserver import an installed pyspark: from Spark's zip that takes a second longer."""
    try:
        installed = metadata.version("pyspark")
    except metadata.PackageNotFoundError:
        return {}
    if installed != pyspark.__version__:
        return {}
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {"PYTHONPATH": os.pathsep.join(p for p in path if os.path.basename(p) != "pyspark.zip")}


class _Followers:
    """The executor's other tasks, which hold their slots until their leader is done."""

    def __init__(self, order: Order, node: Node) -> None:
        self._count = len(node.tasks) - 1
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(_meeting_point(order, node))
        self._listener.listen(self._count)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        """Waits for each follower to have come, since one that comes later would find nobody."""
        with self._listener:
            for _ in range(self._count):
                self._listener.accept()[0].close()


def _follow(order: Order, node: Node) -> None:
    """Waits until this executor's leader is done."""
    with socket.socket(socket.AF_UNIX) as sock:
        while True:
            try:
                sock.connect(_meeting_point(order, node))
                break
            except (ConnectionRefusedError, BlockingIOError):
                time.sleep(_KNOCK)  # it is still starting; if it was killed, Spark ends this task too
        try:
            sock.recv(1)
        except ConnectionResetError:
            pass  # it closed before it had accepted: that too means done


def _meeting_point(order: Order, node: Node) -> str:
    """Returns an abstract socket address: it needs no folder and vanishes with its socket."""
    secret = f"{order.token}/{order.attempt}/{node.index}"  # so that nobody else can guess it
    return f"\0sparkdist-{hashlib.sha256(secret.encode()).hexdigest()[:32]}"
