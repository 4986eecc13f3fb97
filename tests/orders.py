"""The order of a gang of plain ranks, for tests that tell an agent, or read the driver's news, by hand."""

from __future__ import annotations

from typing import Any

from sparkdist.executor.order import Order


def plain(size: int, **changes: Any) -> Order:
    """An order of `size` ranks in as many tasks, without a control channel unless `changes` names one."""
    fields: dict[str, Any] = {
        "run_id": "run",
        "attempt": 0,
        "framework": "plain",
        "launcher": "fast",
        "launcher_args": (),
        "world_size": size,
        "tasks": size,
        "processes_per_task": 1,
        "script": None,
        "env": {},
        "threads": 1,
        "control": None,
        "token": "",
        "logs": "none",
        "idle_timeout": 600.0,
    }
    return Order(**fields | changes)
