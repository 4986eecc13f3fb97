"""Whether the nodes of a gang have found each other: through the driver, or by Spark's own means."""

from __future__ import annotations

from collections.abc import Callable

from sparkdist.executor.link import Link
from sparkdist.executor.order import NodeLost


class Meeting:
    """What one node knows of it.

    Args:
        nodes: How many there are.
        link: This one's connection to the driver.
        ask_task: Has this node's task take part in a gathering of all tasks.

    Attributes:
        some_unheard: Whether a node is there that the driver cannot tell anything.
    """

    def __init__(self, nodes: int, link: Link, ask_task: Callable[[], None]) -> None:
        self._nodes = nodes
        self._link = link
        self._ask_task = ask_task
        self._is_asked = False  # to gather
        self._have_met = self._is_complete = nodes == 1
        self.some_unheard = False

    @property
    def is_complete(self) -> bool:
        """Whether the driver can tell every node of a failure."""
        return self._is_complete and self._link.up

    @property
    def is_to_come(self) -> bool:
        """Whether this node's task may still have to take part in a gathering of all tasks.

        Else one whose ranks return at once could be gone when others begin to wait for it.
        """
        return self._link.up and not self._have_met

    def gather(self) -> None:
        """Has the gang's tasks tell each other where to meet; they all have to take part."""
        if self._nodes > 1 and not self._is_asked:
            self._is_asked = self.some_unheard = True
            self._ask_task()

    def end(self) -> None:
        """Notes that they have."""
        self._have_met = True
        self._link.send({"kind": "gathered", "nodes": self._nodes})

    def complete(self) -> None:
        """Notes that all nodes have come to the driver."""
        self._have_met = self._is_complete = True
        self.some_unheard = False

    def lose_node(self, has_started: bool) -> None:
        """Notes that the driver cannot tell every node of a failure any more.

        Raises:
            NodeLost: This node's ranks wait for the driver, and nobody else will tell them to start.
        """
        if self._nodes == 1:
            return
        self._is_complete = False
        if not has_started and not self._is_asked:
            raise NodeLost("a node of the gang lost the driver, or was lost, before all had started")
