"""How a task, or the driver itself, has one node's ranks run: through the forkserver, by an agent."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sparkdist import wire
from sparkdist.executor import packages, warm
from sparkdist.executor.order import NodeError, NodeLost, Order
from sparkdist.executor.shortage import limits, soft_limits
from sparkdist.executor.topology import Node
from sparkdist.frameworks import resolve

Row = tuple[dict[str, Any], bytes]

LINES = ("report", "log", "record")  # rows of what a rank said
FAILED = ("raised", "exited", "signal", "lost")  # what a row may say of a rank that has failed

# Spark's own secrets, and the sockets they open: no rank needs them.
_SECRETS = re.compile(
    r"SECRET|^_PYSPARK|^PYSPARK_GATEWAY|^PYTHON_WORKER_FACTORY|^PYTHON_UNIX_DOMAIN|^_SPARK_AUTH"
)


@dataclass(frozen=True, kw_only=True)
class Site:
    """What a node's process says of itself.

    Attributes:
        root: Folder that holds the sparkdist package that ranks use.
        base: Folder for the forkservers' own folders.
        parent: Pid of the process that forkservers end with.
        sys_path: Where ranks look for modules.
        cwd: Where they start.
        lifeline: A folder whose end is the forkservers' end too, besides their own folder's.
        environ: Variables that ranks get beyond this process's own.
        start_environ: Variables that forkservers start with beyond this process's own.
        packages: Where the order's environment was unpacked, or None without one.
        pyspark: Where an interpreter that has no pyspark may import this process's from.
    """

    root: str
    base: Path
    parent: int
    sys_path: tuple[str, ...]
    cwd: str
    lifeline: Path | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    start_environ: Mapping[str, str] = field(default_factory=dict)
    packages: Path | None = None
    pyspark: tuple[str, ...] = ()


def lead(
    order: Order,
    node: Node,
    site: Site,
    function: bytes,
    parcel: bytes,
    on_connected: Callable[[socket.socket], None] = lambda conn: None,
    gather: Callable[[str], str] = lambda told: told,
) -> list[Row]:
    """Runs one node's ranks and returns a row for each: what became of it, and its outcome's bytes.

    Reports, lines and records that the driver has not got follow as rows of their own.

    Args:
        order: The attempt.
        node: This node's part of it.
        site: This process.
        function: The pickled function and its arguments; empty for a script.
        parcel: A zip of the code and files that travel with the job; may be empty.
        on_connected: Gets the agent's socket, before there is an agent; whoever shuts it down ends
            the agent and its ranks.
        gather: Tells the other nodes something and returns what the first of them has told, where
            they cannot all be reached by the driver.

    Raises:
        NodeError: The ranks could not be started.
    """
    environ = without_secrets(os.environ)
    with _connect(order, site, environ, on_connected) as conn:
        message = {
            "order": order.to_json(),
            "node": asdict(node),
            "environ": packages.environ(order.packages, site.packages, {**environ, **site.environ}),
            "sys_path": packages.path(order.packages, site.packages, site.sys_path),
            "cwd": site.cwd,
            "root": site.root,
            "limits": soft_limits(),
        }
        try:
            wire.send(conn, message)
            wire.send(conn, {"kind": "function"}, function)
            wire.send(conn, {"kind": "parcel"}, parcel)
            return _answer(conn, gather)
        except NodeLost as loss:
            reason = str(loss)
        except OSError:
            reason = "its agent was killed"
    return [_lost(rank, node, reason) for rank in range(node.first_rank, node.first_rank + node.size)]


def _answer(conn: socket.socket, gather: Callable[[str], str]) -> list[Row]:
    """Serves an agent until it is done; returns its rows.

    Raises:
        NodeError: It could not start its ranks.
        NodeLost: Not either, because another node has gone.
        OSError: It was lost.
    """
    rows: list[Row] = []
    while frame := wire.receive(conn, wire.LOGS_LIMIT):
        header, body = frame
        if header["kind"] == "row":
            rows.append((header["row"], bytes(body)))
        elif header["kind"] == "gather":
            store = _gather(gather, header["store"])
            with suppress(BrokenPipeError):  # an agent that has ended meanwhile has left its answer
                wire.send(conn, {"kind": "store", "store": store})
        elif header["kind"] == "error":
            raise NodeError(header["message"])
        elif header["kind"] == "lost":
            raise NodeLost(header["message"])
        else:
            return rows
    raise ConnectionResetError


def _gather(gather: Callable[[str], str], told: object) -> object:
    try:
        return json.loads(gather(json.dumps(told)))
    except Exception as error:
        raise NodeError(f"the gang's tasks could not tell each other where to meet: {error!r}") from error


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without what opens Spark's own sockets."""
    return {name: value for name, value in environ.items() if not _SECRETS.search(name)}


def warm_up(order: Order, site: Site, environ: Mapping[str, str]) -> None:
    """Has the forkserver for an order started, if it is not there, without waiting for it."""
    warm.connect(_kind(order, site, environ), site.base, environ).close()


def _kind(order: Order, site: Site, environ: Mapping[str, str]) -> warm.Kind:
    framework = resolve(order.framework, order.launcher)
    start_env = {**environ, **order.env}
    of_its_own = bool(order.packages and order.packages.python)  # an interpreter
    read_at_start = {
        name: value
        for name, value in start_env.items()
        if any(fnmatchcase(name, pattern) for pattern in framework.start_env)
    }
    if order.packages and not of_its_own:
        read_at_start["PYTHONPATH"] = environ["PYTHONPATH"]
    return warm.Kind(
        root=site.root,
        preload=("pyspark.cloudpickle", *framework.preload),
        preload_idle=framework.preload_idle,
        distribution=framework.distribution,
        environ=read_at_start,
        parent=site.parent,
        idle_timeout=order.idle_timeout,
        python=packages.interpreter(order.packages, site.packages),
        environment=order.packages.label if order.packages else "",
        path=site.pyspark if of_its_own else (),
        versions=order.versions,
    )


def _connect(
    order: Order, site: Site, environ: Mapping[str, str], on_connected: Callable[[socket.socket], None]
) -> socket.socket:
    start = packages.environ(order.packages, site.packages, {**environ, **site.start_environ})
    kind = _kind(order, site, start)
    for _ in range(2):  # a server may be killed, or end, just as we connect
        conn = warm.connect(kind, site.base, start, site.lifeline)
        on_connected(conn)
        try:
            answer = wire.receive(conn, max_body=0)
        except OSError:
            answer = None
        if answer is not None:
            break
        conn.close()
    else:
        raise NodeError(f"the forkserver ended before it could fork an agent, twice. {limits()}")
    if answer[0]["kind"] == "error":
        conn.close()
        raise NodeError(answer[0]["message"])
    return conn


def _lost(rank: int, node: Node, reason: str) -> Row:
    header = {"kind": "lost", "rank": rank, "node": node.index, "host": socket.gethostname()}
    header |= {
        "message": reason,
        "unheard": True,
        "untold": True,
        "speechless": True,
    }
    return header, b""
