"""What a launcher of the framework's own runs for each rank: it ties the rank to the agent.

Run as a file, so that it needs nothing on sys.path. Its argument is a memory file of the agent's
with what `sparkdist.executor.node_launcher` wrote.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Becomes the rank that LOCAL_RANK names."""
    with open(sys.argv[1], "rb") as stream:
        spec = json.load(stream)
    sys.path[0] = spec["root"]
    from sparkdist.executor import process, worker

    process.die_with_parent(os.getppid())
    mine = spec["ranks"][int(os.environ["LOCAL_RANK"])]
    orders = mine["orders"]
    _, events, stdout, stderr, outcome, stacks = mine["ends"]
    ends = worker.Ends(
        orders=-1,
        events=os.open(events, os.O_WRONLY),
        stdout=os.open(stdout, os.O_WRONLY),
        stderr=os.open(stderr, os.O_WRONLY),
        outcome=os.open(outcome, os.O_RDWR),
        stacks=os.open(stacks, os.O_RDWR | os.O_APPEND),
    )
    worker.redirect(ends)
    os.truncate(ends.outcome, 0)  # of an earlier attempt of torchrun's own
    if not orders["script"]:
        _fork_a_function(ends.events, ends.outcome)
    with open(spec["function"], "rb") as stream:
        function = stream.read()
    os.chdir(orders["cwd"])
    sys.path[:] = orders["sys_path"]
    worker.run(ends, orders, function)


def _fork_a_function(events: int, outcome: int) -> None:
    """Returns in a child; this process then ends as the child does, unless it exits with 0 early.

    A launcher takes 0 for success, and would let the function's peers wait for it for ever.
    """
    from sparkdist import wire
    from sparkdist.executor import process

    parent = os.getpid()
    child = os.fork()
    if child == 0:
        process.die_with_parent(parent)
        return
    pidfd = os.pidfd_open(child)

    def pass_on(number: int, frame: object) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, pass_on)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has left one already
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(parent, -code)
    if code == 0 and os.fstat(outcome).st_size == 0:
        code = 1
        os.write(events, wire.pack({"kind": "exited", "code": 0, "message": ""}))
    os._exit(code)


if __name__ == "__main__":
    main()
