"""Growth of a running gang: whether slots have come for ranks that it had to start without."""

from __future__ import annotations

import time

from sparkdist.driver.slots import Slots


class GangGrows(Exception):
    """Ends a gang that is to go on with more ranks."""


class Growth:
    """Watches for more slots.

    Args:
        slots: The cluster's slots.
        tasks, most: Tasks that the gang has, and that it would have.
        resize_wait: Seconds that it waits for slots for all of them once there are more than it has.
    """

    PAUSE = 1.0  # s between two looks

    def __init__(self, slots: Slots, tasks: int, most: int, resize_wait: float) -> None:
        self._slots = slots
        self._tasks = tasks
        self._most = most
        self._resize_wait = resize_wait
        self._more_since: float | None = None

    def look(self) -> None:
        """Looks whether the gang is to grow now.

        Raises:
            GangGrows: It is.
        """
        now, slots = time.monotonic(), min(self._slots.count() or 0, self._most)  # 0: nobody can tell now
        if slots <= self._tasks:
            self._more_since = None
            return
        self._more_since = self._more_since or now
        if slots == self._most or now - self._more_since >= self._resize_wait:
            raise GangGrows(f"there are slots for more ranks: {slots} instead of {self._tasks}")
