"""The ranks of one node as a group: how they come to life, and what they are told."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import asdict
from functools import partial
from typing import Any

from sparkdist import wire
from sparkdist.executor import checks, process, topology, worker
from sparkdist.executor.node_launcher import NodeLauncher
from sparkdist.executor.order import NodeError, Order
from sparkdist.executor.ranks import Rank
from sparkdist.executor.run_folder import RunFolder
from sparkdist.executor.shortage import shortage
from sparkdist.executor.topology import Node
from sparkdist.frameworks import Place, resolve
from sparkdist.rank_context import RankContext


class Staff:
    """Starts this node's ranks, by fork or through a launcher of the framework's own.

    Args:
        order: The attempt.
        node: This node's part of it.
        message: What the task says of itself: environ, sys_path, cwd, root (the folder that holds
            this package).
        folder: Where this run's files go.
    """

    def __init__(self, order: Order, node: Node, message: dict[str, Any], folder: RunFolder) -> None:
        self.order = order
        self.node = node
        self.framework = resolve(order.framework, order.launcher)
        self.ranks = [Rank(node.first_rank + local) for local in range(node.size)]
        self.launcher: NodeLauncher | None = None
        self.started = False
        self.root: str = message["root"]
        self.function = b""
        self.library_fds: set[int] = set()
        self._message = message
        self.folder = folder
        folder.make(order.run_id, order.keep)

    def prepare(self, function: bytes, parcel: bytes, library_fds: set[int]) -> None:
        """Takes what ranks will run.

        Args:
            function: The pickled function and its arguments; empty for a script.
            parcel: A zip of the code and files that travel with the job; may be empty.
            library_fds: Descriptors that ranks keep.

        Raises:
            NodeError: They will import a module that is not here, or the folder cannot be used.
        """
        self.function = function
        self.library_fds = library_fds
        if parcel:
            self.folder.unpack(parcel)
        missing = checks.first_missing(self.order.modules, self._path())
        if missing:
            label = self.order.packages.label if self.order.packages else ""
            raise NodeError(
                f"the Python of {socket.gethostname()} ({sys.executable}) has no {missing}, which the user's "
                f"code imports and the driver has. {checks.remedy(label)}"
            )

    def park(self) -> None:
        """Forks the ranks; each waits to be told where it stands."""
        if self.framework.whole_node:
            return
        for rank in self.ranks:
            ends = worker.Ends(*rank.pipes.theirs)
            rank.fork(partial(worker.be_rank, ends, self.library_fds, self.framework, self.function))
            rank.pipes.close_theirs()

    def open_store(self) -> tuple[str, int] | None:
        """Opens the gang's meeting point if this is its first node; returns address and port.

        The port is bound before anyone is told of it, on the gang's own interface; 0 without a store.

        Raises:
            NodeError: None of the ports it may have is free.
        """
        if self.node.index:
            return None
        address = topology.address_towards(self.node.peer)
        if not (self.framework.has_store or self.framework.whole_node):
            return address, 0
        try:
            listener = wire.bind(address, self.order.ports)
        except OSError as error:
            reason = shortage(error) or error.strerror
            raise NodeError(f"the gang's store cannot listen on {socket.gethostname()}: {reason}") from error
        with listener:
            port = int(listener.getsockname()[1])
            if self.framework.has_store:
                self._fork_store(listener)
            # A launcher of the framework's own binds the port itself once it is closed here.
        return address, port

    def _fork_store(self, listener: socket.socket) -> None:
        parent = os.getpid()
        if os.fork() == 0:
            try:
                process.die_with_parent(parent)
                worker.close_all_but(self.library_fds | {0, 1, 2, listener.fileno()})
                self.framework.serve(listener)
            finally:
                os._exit(1)

    def start(self, address: str, port: int) -> None:
        """Tells every rank where it stands and where the gang meets."""
        self.started = True
        interface = topology.interface_of(topology.address_towards(self.node.peer and address))
        places = [self._place(local, address, port, interface) for local in range(self.node.size)]
        if self.framework.whole_node:
            self.launcher = NodeLauncher(self, places)
        else:
            for rank, place in zip(self.ranks, places, strict=True):
                environ = self.environ(self.framework.rank_env(place))
                rank.start({"environ": environ, **self.orders(place)})

    def _place(self, local: int, address: str, port: int, interface: str) -> Place:
        return Place(
            rank=self.node.first_rank + local,
            local_rank=local,
            world_size=self.order.world_size,
            local_sizes=tuple(self.node.sizes),  # JSON has made it a list
            node=self.node.index,
            run_id=self.order.run_id,
            attempt=self.order.attempt,
            max_restarts=self.order.max_restarts,
            master_addr=address,
            master_port=port,
            interface=interface,
            threads=self.order.threads,
            error_file=self.folder.error_file(local),
        )

    def environ(self, computed: dict[str, str]) -> dict[str, str]:
        """Returns a rank's environment: the task's, then ours, then what the user set."""
        ours = {"SPARKDIST_RUN_ID": self.order.run_id, "SPARKDIST_ATTEMPT": str(self.order.attempt)}
        return {**self._message["environ"], **computed, **ours, **self.order.env}

    def orders(self, place: Place) -> dict[str, Any]:
        """Returns what a rank is told besides its environment."""
        code, ship = self.folder.code, self.folder.ship
        script = list(self.order.script) if self.order.script else None
        if script:
            script[0] = str(code / script[0])  # an absolute path stays as it is
        context = RankContext(
            rank=place.rank,
            world_size=place.world_size,
            local_rank=place.local_rank,
            local_world_size=place.local_world_size,
            node_rank=place.node,
            attempt=place.attempt,
            run_id=place.run_id,
            ship_folder=str(ship) if ship.exists() else "",
            kept_folder=str(self.folder.kept.path) if self.folder.kept else "",
        )
        meant = place.rank, place.attempt
        faults = [asdict(each) for each in self.order.faults if (each.rank, each.attempt) == meant]
        return {
            "sys_path": self._path(),
            "cwd": self._message["cwd"],
            "script": script,
            "context": asdict(context),
            "logs_json": self.order.logs_json,
            "faults": faults,
            "sockets": self.folder.sockets,
            "waits": [self.order.framework, self.order.launcher] if self.order.stall_timeout else None,
        }

    def _path(self) -> list[str]:
        """Returns where ranks look for modules."""
        path = [str(self.folder.code)] if self.folder.code.exists() else []
        if self.order.packages and self.order.packages.python:
            path += sys.path[1:]  # of the interpreter that the agent was forked in
        path += [entry for entry in self._message["sys_path"] if entry not in path]
        path += [str(self.folder.ship)] if self.folder.ship.exists() else []
        if self.root not in path:
            path.insert(0, self.root)
        return path

    def living(self) -> list[Rank]:
        """Returns the ranks whose process is there and has not been seen to end."""
        return [rank for rank in self.ranks if rank.alive and rank.pid]

    def busy(self) -> bool:
        """Says whether anything here still runs, or is yet to start."""
        if self.framework.whole_node:
            return not self.started or (self.launcher is not None and self.launcher.alive)
        return any(rank.alive for rank in self.ranks)

    def signal(self, number: int) -> None:
        """Sends a signal to every living rank, and to their launcher."""
        if self.launcher:
            self.launcher.signal(number)
        for rank in self.living():
            rank.signal(number)

    def blame_the_dying(self, now: float) -> None:
        """Notes ranks whose process is just ending as failed; their peers notice before we do."""
        for rank in self.living():
            if rank.left is None and process.is_exiting(rank.pid):
                rank.fail(now)

    def own_error(self, rank: Rank) -> str:
        """Returns what the rank left in its error file by the framework's own means."""
        return self.framework.own_error(self.folder.error_file(rank.rank - self.node.first_rank))
