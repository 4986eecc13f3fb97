"""What a launcher of the framework's own runs for each rank: it ties the rank to the agent.

Run as a file, so that it needs nothing on sys.path. Its argument is a memory file of the agent's
with what `sparkdist.executor.node_launcher` wrote.
"""

from __future__ import annotations

import json
import os
import sys


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
    with open(spec["function"], "rb") as stream:
        function = stream.read()
    os.chdir(orders["cwd"])
    sys.path[:] = orders["sys_path"]
    worker.run(ends, orders, function)


if __name__ == "__main__":
    main()
