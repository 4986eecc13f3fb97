"""A run's attempts, counted on the driver: one after another until one succeeds or none may follow."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from datetime import UTC, datetime

from sparkdist.driver import outcome
from sparkdist.driver.attempt import Plan, run_attempt
from sparkdist.driver.board import Board
from sparkdist.driver.budget import Budget
from sparkdist.driver.console import Console
from sparkdist.driver.growth import GangGrows, Growth
from sparkdist.driver.status import Status
from sparkdist.errors import PreflightError, SparkdistError, TrainingFailed, TrainingTimeout
from sparkdist.results import Attempt, RankResult, Report


class Attempts:
    """The attempts of a run.

    Attributes:
        run_id: The run.
        ended: Those that have ended.
        board: What is known of the last one.
        reports: What ranks reported, in all of them.
    """

    def __init__(self, plan: Plan) -> None:
        self.run_id = plan.order.run_id
        self.ended: list[Attempt] = []
        self.board = Board()
        self.reports: list[Report] = []
        self._plan = plan
        self._budget = Budget(plan.settings)
        self._order = plan.order  # of the attempt under way

    def run(self) -> tuple[RankResult, ...]:
        """Runs attempts until one succeeds; returns its results in rank order.

        Raises:
            TrainingFailed: Ranks failed, and the gang is not to be started again.
            SparkdistError: Something else ended the run.
        """
        last: TrainingFailed | None = None
        with self._console() as console:
            while True:
                self._order = replace(self._plan.order, attempt=len(self.ended))
                self.board = Board()
                growth = self._take_slots(console, last)
                started = datetime.now(UTC)
                try:
                    ranks = self._train(console, growth)
                except GangGrows as reason:
                    self._end(started, cause=str(reason))
                except SparkdistError as error:
                    self._end(started, error)
                    self._mark(error)
                    if not isinstance(error, TrainingFailed) or not self._may_follow(error):
                        raise
                    last = error
                else:
                    self._end(started)
                    return ranks
                self._tell(console)

    def _console(self) -> Console:
        settings = self._plan.settings
        return Console(settings.stdout, settings.stderr, settings.log_time)

    def _train(self, console: Console, growth: Growth | None) -> tuple[RankResult, ...]:
        try:
            run_attempt(self._plan, self._order, self.board, console, self._numbers(), growth)
            return outcome.settle(self._order, self.board)
        finally:
            self.reports += self.board.reports

    def _numbers(self) -> tuple[int, int]:
        """Returns which attempt this is, from 1, and how many there may be as far as that is known."""
        number = self._order.attempt + 1
        return number, number + max(0, self._budget.restarts)

    def _end(self, started: datetime, error: SparkdistError | None = None, cause: str | None = None) -> None:
        root = error.root if isinstance(error, TrainingFailed) else None
        self.ended.append(
            Attempt(
                number=self._order.attempt,
                started=started,
                ended=datetime.now(UTC),
                world_size=self._order.world_size,
                cause=cause or (str(root or error) if error else None),
                failure=root,
            )
        )

    def _mark(self, error: SparkdistError) -> None:
        error.attempts, error.metrics = tuple(self.ended), tuple(self.reports)

    def _may_follow(self, error: TrainingFailed) -> bool:
        if outcome.is_called_off(self.board):
            return False
        return self._budget.spend(error.root, bool(self.board.reported))

    def _tell(self, console: Console) -> None:
        ended = self.ended[-1]
        console.say(f"attempt {ended.number + 1} has ended: {ended.cause}\nstarting another one")

    def _take_slots(self, console: Console, last: TrainingFailed | None) -> Growth | None:
        """Gives the attempt its size; waits for slots that a lost executor leaves missing.

        Returns:
            What it may grow by, if it is to grow.

        Raises:
            PreflightError: There are too few slots for the first attempt.
            TrainingTimeout: The run's time is up.
            TrainingFailed: There are too few slots for another attempt: the last one's failure.
        """
        slots, settings, most = self._plan.slots, self._plan.settings, self._plan.order.tasks
        if slots is None:
            return None
        text = f"waiting for {most} slot{'s' * (most > 1)}"
        console.show(Status(settings.status, lambda: (text, None), self._numbers()))
        per_task = self._order.processes_per_task
        least = -(-(settings.min_processes or self._order.world_size) // per_task)
        has_grown = self.ended and self.ended[-1].failure is None
        left = self._time_left()
        wait = 0.0 if has_grown else min(settings.resize_wait, left)
        try:
            if self._order.attempt == 0:
                tasks = slots.take(least, most, wait, left)
            else:
                tasks = slots.wait(least, most, wait, min(settings.start_timeout, left))
        except PreflightError as error:
            raise self._without_slots(error, text, last) from (last and last.__cause__)
        if tasks == most:
            return None
        self._order = replace(self._order, tasks=tasks, world_size=tasks * per_task)
        return Growth(slots, tasks, most, settings.resize_wait) if settings.grow else None

    def _time_left(self) -> float:
        deadline = self._plan.deadline
        return math.inf if deadline is None else max(0.0, deadline - time.monotonic())

    def _without_slots(self, error: PreflightError, text: str, last: TrainingFailed | None) -> SparkdistError:
        """Returns what a run ends with that has too few slots for an attempt."""
        found: SparkdistError = error
        if not self._time_left():
            assert self._plan.settings.timeout is not None
            found = TrainingTimeout("timeout", self._plan.settings.timeout, {}, phase=f"still {text}")
        elif last is not None:
            last.add_note(f"It was not started again: {error}")
            found = last
        self._mark(found)
        return found
