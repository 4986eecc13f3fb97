"""A user's driver in a process of its own. It is told what to do, line by line, and says what came of it.

python -m tests.faults.driver MASTER|remote=REMOTE [CONF=VALUE ...]
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.faults import programs


def rank_of_a_pair() -> tuple[int, float]:
    """A rank that needs the other one."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    print("summed", flush=True)
    return programs.rank(), float(total)


def fail() -> None:
    if programs.rank() == 1:
        raise ValueError("of rank 1")
    programs.sleep_for_ever()


def uneven(folder: Path) -> int:
    """Rank 1 takes a second longer than rank 0, in which Spark looks twenty times for slow tasks."""
    (folder / f"start-{os.getpid()}").touch()
    time.sleep(programs.rank())
    return programs.rank()


def outcome(what: str, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Runs one thing and tells its values, or its error."""
    from sparkdist import Launcher

    tasks: dict[str, tuple[Any, ...]] = {
        "ranks": (programs.rank,),
        "pair": (rank_of_a_pair,),
        "fail": (fail,),
        "uneven": (uneven, Path(folder)),
        "large": (programs.take, os.urandom(5_000_000)),
        "wait": (programs.announce_and_wait, Path(folder)),
        "wait, deaf": (programs.announce_and_wait, Path(folder), True),
    }
    began = time.time()
    try:
        launcher = Launcher(**{"framework": "plain", "num_processes": 2, "timeout": 60, **settings})
        values = launcher.launch(*tasks[what]).values
        return {"values": values}
    except (KeyboardInterrupt, Exception) as error:
        return {
            "error": type(error).__name__,
            "text": str(error),
            "at": time.time(),
            "after": time.time() - began,
        }


def stop_beside(session: Any, folder: Path) -> None:
    """Stops the session once the ranks are in their function."""
    while not {"0", "1"} <= set(os.listdir(folder)):
        time.sleep(0.05)
    session.stop()


def start(where: str, *confs: str) -> Any:
    """Starts a session of either kind."""
    from pyspark.sql import SparkSession

    kind, _, remote = where.partition("remote=")
    builder = SparkSession.builder.remote(remote) if remote else SparkSession.builder.master(kind)
    for conf in confs:
        builder = builder.config(*conf.split("=", 1))
    session = builder.getOrCreate()
    if not remote:
        session.sparkContext.setLogLevel("ERROR")
    return session


def main() -> None:
    session = start(*sys.argv[1:])
    ready = {"ready": os.getpid(), "handler": getattr(signal.getsignal(signal.SIGINT), "__module__", None)}
    print("\n@" + json.dumps(ready), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        before = signal.getsignal(signal.SIGINT)
        if order.get("stop"):
            stopping = threading.Thread(target=stop_beside, args=(session, Path(order["folder"])))
            stopping.start()
        said = outcome(order["what"], order.get("folder", ""), order.get("settings", {}))
        if order.get("stop"):
            stopping.join()
        said["restored"] = signal.getsignal(signal.SIGINT) is before
        print("\n@" + json.dumps(said), flush=True)
    # The server may be gone, and a client waits for it at its end.
    os._exit(0)


if __name__ == "__main__":
    main()
