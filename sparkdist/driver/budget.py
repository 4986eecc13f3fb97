"""What a run may still fail: whether the gang is started again after a failure."""

from __future__ import annotations

from sparkdist import values
from sparkdist.errors import Failure
from sparkdist.settings import Settings

_IN_A_ROW = 5  # preemptions without a report, after which another start would get no further


class Budget:
    """Counts a run's failures.

    Attributes:
        restarts: How many failures may still be followed by a restart.
    """

    def __init__(self, settings: Settings) -> None:
        self.restarts = settings.max_restarts
        self._preemptions = settings.max_preemptions
        self._in_a_row = 0
        self._on = settings.restart_on
        self._not_on = settings.no_restart_on

    def spend(self, failure: Failure, has_reported: bool) -> bool:
        """Counts an attempt's end; says whether another one may follow.

        Args:
            failure: Its root failure.
            has_reported: Whether its training got as far as to report.
        """
        if _is_one_of(failure, self._not_on):
            return False
        if failure.preempted:
            return self._spend_preemption(has_reported)
        self._in_a_row = 0
        if self._on is not None and not _is_one_of(failure, self._on):
            return False
        self.restarts -= 1
        return self.restarts >= 0

    def _spend_preemption(self, has_reported: bool) -> bool:
        self._in_a_row = 0 if has_reported else self._in_a_row + 1
        if self._preemptions is None:
            return self._in_a_row < _IN_A_ROW
        self._preemptions -= 1
        return self._preemptions >= 0


def _is_one_of(failure: Failure, causes: tuple[type[BaseException] | int, ...]) -> bool:
    names = {failure.type_name, *failure.bases}
    return any(
        values.type_name(cause) in names if isinstance(cause, type) else cause == failure.exit_status
        for cause in causes
    )
