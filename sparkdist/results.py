"""What a run gives back: `Results`, one `RankResult` per rank, one `Attempt` per try."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sparkdist.errors import Failure


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """One rank's outcome.

    Attributes:
        rank: The rank, 0 to world_size - 1.
        value: What its function returned; None for a script.
        host: Name of the host it ran on.
        node: Index of its node (one executor, or the driver) in the gang.
        seconds: Seconds from entering the function or script to leaving it; 0 for a script that
            ended by `os._exit(0)`.
    """

    rank: int
    value: Any
    host: str
    node: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One try of a run.

    Attributes:
        number: 0 for the first.
        started: When it was asked for (UTC).
        ended: When its last rank had ended and the driver knew (UTC).
        world_size: Its number of ranks.
        cause: Why it ended other than by success, in words, or None.
        failure: The root failure that ended it, or None.
    """

    number: int
    started: datetime
    ended: datetime
    world_size: int
    cause: str | None = None
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a rank said of its training by `sparkdist.report`.

    Attributes:
        attempt: The attempt it was in.
        rank: Who said it.
        step: The step, as the rank counts them, or None.
        metrics: Numbers by name.
        time: When it was said (UTC, by the rank's clock).
    """

    attempt: int
    rank: int
    step: int | None
    metrics: dict[str, float]
    time: datetime


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Where the time of a run went, in seconds.

    Attributes:
        slots: From the call until every node of the gang had an agent: Spark's scheduling and
            Python workers and, in a cold start, the framework's import. Attempts that failed are in it.
        start: From then until every rank had entered the function.
        training: From then until the last rank had left the function.
        results: From then until the results were on the driver and the slots were free again.
    """

    slots: float
    start: float
    training: float
    results: float

    @property
    def total(self) -> float:
        """Seconds from the call to its return."""
        return self.slots + self.start + self.training + self.results


@dataclass(frozen=True, kw_only=True)
class Results:
    """Every rank's result.

    Attributes:
        ranks: One per rank, in rank order.
        attempts: Every try, in order; the last one succeeded.
        timings: Where the time went.
        run_id: The run's identifier, as ranks see it in `TORCHELASTIC_RUN_ID`.
        metrics: What ranks said by `sparkdist.report`, of all attempts, in the order it came; of each
            rank and attempt the last 10,000 reports.
    """

    ranks: tuple[RankResult, ...]
    attempts: tuple[Attempt, ...]
    timings: Timings
    run_id: str
    metrics: tuple[Report, ...] = ()

    @property
    def values(self) -> list[Any]:
        """Every rank's return value, in rank order."""
        return [rank.value for rank in self.ranks]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def rank(self, rank: int) -> RankResult:
        """Returns one rank's result.

        Raises:
            IndexError: There is no such rank.
        """
        if not 0 <= rank < len(self.ranks):
            raise IndexError(f"there is no rank {rank}; ranks go from 0 to {len(self.ranks) - 1}")
        return self.ranks[rank]
