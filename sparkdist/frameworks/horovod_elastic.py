"""`horovod.elastic` where a failure ends all ranks: what states commit outlives them.

Of each node one rank writes its commits into the folder that the node keeps for the run's next attempt.
There `hvd.elastic.run` starts from the newest commit that any node has.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

from sparkdist import values
from sparkdist.rank_context import context

_BINDINGS = ("horovod.torch", "horovod.tensorflow", "horovod.mxnet")
_runs = 0  # of hvd.elastic.run in this rank; all ranks count alike


def install() -> None:
    """Has commits kept and found again; to be called once in a rank."""
    from horovod.common import elastic

    manager = elastic.notification_manager
    register = manager.register_listener

    def register_listener(state: Any) -> None:
        # What hvd.elastic.run does with a state before it synchronizes it for the first time.
        register(state)
        _resume(state)

    def commit(state: Any) -> None:
        state.save()
        _keep(state)
        state.check_host_updates()

    # Its service would wait for news of hosts, which never come: a gang that grows is started anew.
    manager.init = lambda *args, **kwargs: None
    manager.register_listener = register_listener
    elastic.State.commit = commit


def _resume(state: Any) -> None:
    """Gives a state the newest commit of earlier attempts, if there is one."""
    global _runs
    _runs += 1
    state._sparkdist_commit = _runs, 0
    if not context().attempt:
        return
    hvd = _binding(state)
    mine = _read()
    numbers = hvd.allgather_object(mine[0] if mine else 0, name="sparkdist.commits")
    newest = max(numbers)
    if not newest:
        return
    root = numbers.index(newest)
    # With a name: Horovod's own is that of the object's type, which differs here.
    data = hvd.broadcast_object(mine and mine[1], root_rank=root, name="sparkdist.commit")
    _, size, saved = values.loads(data)
    state._sparkdist_commit = _runs, newest
    for holder, found in zip(_holders(state), saved, strict=True):
        vars(holder).update(found)
    state.restore()
    if size != context().world_size:
        state.on_reset()


def _binding(state: Any) -> Any:
    """Returns the part of Horovod that a state talks through: each has a gang of its own."""
    module = ".".join(getattr(state._bcast_object, "__module__", "").split(".")[:2])
    names = [module] if module in _BINDINGS else _BINDINGS
    found = [sys.modules[name] for name in names if name in sys.modules]
    return next(hvd for hvd in found if hvd.is_initialized())


def _holders(state: Any) -> list[Any]:
    """Returns the objects that hold what a state has saved."""
    return [state, *getattr(state, "_handlers", {}).values()]


def _saved(holder: Any) -> dict[str, Any]:
    """Returns what Horovod itself saved of a state in memory."""
    return {name: value for name, value in vars(holder).items() if name.startswith(("_saved", "_values"))}


def _keep(state: Any) -> None:
    """Writes a commit for later attempts, whole or not at all."""
    here = context()
    run, number = getattr(state, "_sparkdist_commit", (0, 0))
    if not run:
        return  # outside of hvd.elastic.run, where nobody would look for it
    state._sparkdist_commit = run, number + 1
    if here.local_rank:
        return
    path = here.kept / f"horovod-{run}"
    unfinished = path.with_suffix(".unfinished")
    try:
        data = values.dumps((number + 1, here.world_size, [_saved(holder) for holder in _holders(state)]))
        unfinished.write_bytes(data)
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        warnings.warn(
            f"this commit will not outlive a failure: {path.parent}: {error.strerror}", stacklevel=3
        )


def _read() -> tuple[int, bytes] | None:
    """Returns the number and the bytes of this node's newest commit; of local rank 0 only."""
    path = context().kept / f"horovod-{_runs}"
    if context().local_rank or not path.exists():
        return None
    data = path.read_bytes()
    return values.loads(data)[0], data
