"""The seam between the engine and a framework.

The engine starts, watches and ends ranks; a `Framework` says what differs: what to import once
before ranks are forked, how many ranks a task holds, what to serve beside them, and what each
rank's environment says. A plug-in is made anew from its name wherever it is needed (driver, task,
agent, rank), so it holds no state and its modules import the framework only inside methods.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one rank stands, and where its gang meets.

    Attributes:
        rank: 0 to world_size - 1; ranks are numbered node by node.
        local_rank: 0 to local_world_size - 1, within the node.
        world_size: Ranks in the gang.
        local_sizes: The numbers of ranks of all nodes, by node.
        node: Index of the node, 0 to node_count - 1. A node is one executor, or the driver.
        run_id: The run.
        attempt: 0 for the first try.
        max_restarts: How many failures start the gang again.
        master_addr: Address of the gang's store, or of node 0 where there is no store.
        master_port: Its port; 0 where there is no store.
        interface: Name of this node's network interface towards master_addr, or "".
        threads: Cores that this rank may use.
        error_file: Where the rank may leave a description of its own failure.
    """

    rank: int
    local_rank: int
    world_size: int
    local_sizes: tuple[int, ...]
    node: int
    run_id: str
    attempt: int
    max_restarts: int
    master_addr: str
    master_port: int
    interface: str
    threads: int
    error_file: str

    @property
    def local_world_size(self) -> int:
        """Ranks on this node."""
        return self.local_sizes[self.node]

    @property
    def node_count(self) -> int:
        """Nodes in the gang."""
        return len(self.local_sizes)


class Framework:
    """What the engine asks of a framework; the defaults are those of plain Python functions.

    Attributes:
        name: The plug-in's name, as `Launcher(framework=...)` takes it.
        distribution: The package that executors must have, or None.
        preload: Modules that the forkserver imports once, before any rank is forked. They must be
            safe to fork after import: no threads, no device opened.
        preload_idle: More of them, which ranks often import later by themselves: the forkserver
            imports them when it has nothing to do, so that no start waits for them.
        start_env: Globs of variables that are read when Python starts or the framework is
            imported; runs that differ in them do not share a forkserver.
        reserved_env: Names that the plug-in computes and a user may not set.
        waits: What the frames of a stack look like that wait for other ranks or for the store, as a
            regular expression for "FILE FUNCTION"; "" for none.
        has_store: Whether `serve` is wanted beside rank 0.
        whole_node: Whether `run_node` starts the ranks of a node instead of the agent.
    """

    name: str = "plain"
    distribution: str | None = None
    preload: tuple[str, ...] = ()
    preload_idle: tuple[str, ...] = ()
    start_env: tuple[str, ...] = ("PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTHONWARNINGS", "PYTHONDEVMODE")
    reserved_env: frozenset[str] = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"})
    waits: str = ""
    has_store: bool = False
    whole_node: bool = False

    def check(self, launcher_args: tuple[str, ...]) -> None:
        """Checks the launcher's own arguments, on the driver.

        Raises:
            ConfigurationError: One cannot be used.
        """

    def processes_per_task(self, gpus_per_task: int) -> int:
        """Returns how many ranks one Spark task holds."""
        return max(1, gpus_per_task)

    def serve(self, listener: socket.socket) -> None:
        """Serves the gang's store on `listener` until this process is killed.

        Runs in a process of its own beside rank 0, forked after the ranks: a rank that inherited
        the store's sockets would keep a dead store's connections open.
        """
        raise NotImplementedError

    def rank_env(self, place: Place) -> dict[str, str]:
        """Returns the environment variables that tell a rank where it stands."""
        return {
            "RANK": str(place.rank),
            "LOCAL_RANK": str(place.local_rank),
            "WORLD_SIZE": str(place.world_size),
            "LOCAL_WORLD_SIZE": str(place.local_world_size),
        }

    def after_fork(self, environ: Mapping[str, str]) -> None:
        """Puts right in a rank what a fork copied from the forkserver, before the user's code."""

    def show_waits(self) -> None:
        """Gives calls that wait in C alone a frame in the stack; called in a rank, before the user's code."""

    def own_error(self, error_file: str) -> str:
        """Returns what a rank left in its error file by the framework's own means, or ""."""
        return ""

    def run_node(self, place: Place, shim: list[str], args: tuple[str, ...]) -> dict[int, int]:
        """Starts this node's ranks by a launcher of the framework's own, and waits for them.

        Args:
            place: The node's first rank.
            shim: argv that each rank must run; a rank finds itself by LOCAL_RANK.
            args: The launcher's own options.

        Returns:
            Exit codes by local rank of the ranks that failed, in the order they did; negative
            for signals.
        """
        raise NotImplementedError
