"""What a training function may ask about the rank it runs in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Where a rank stands in its gang.

    Attributes:
        rank: 0 to world_size - 1, over the whole gang.
        world_size: Number of ranks in the gang.
        local_rank: 0 to local_world_size - 1, on this node.
        local_world_size: Number of ranks on this node.
        node_rank: Index of this node (one executor, or the driver).
        attempt: 0 for the first try of the run.
        run_id: The run's identifier.
        ship_folder: Where things sent with `ship=` are, or ""; see `shipped`.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    attempt: int
    run_id: str
    ship_folder: str = ""

    def shipped(self, name: str) -> Path:
        """Returns the path on this node of something sent with `ship=`.

        Raises:
            FileNotFoundError: Nothing of that name was shipped.
        """
        path = Path(self.ship_folder, name)
        if not self.ship_folder or not path.exists():
            raise FileNotFoundError(f"nothing named {name!r} was sent with ship=")
        return path


_current: RankContext | None = None


def context() -> RankContext:
    """Returns this rank's context.

    Raises:
        RuntimeError: This process is not a rank of a sparkdist run.
    """
    if _current is None:
        raise RuntimeError("this process is not a rank: context() works in a function started by sparkdist")
    return _current


def enter(context: RankContext) -> None:
    """Makes `context` this process's; called once by the worker before the user's code."""
    global _current
    _current = context
