"""The order: what the driver tells the executors about one attempt of a run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from sparkdist.errors import SparkdistError
from sparkdist.testing import Fault


class NodeError(SparkdistError, RuntimeError):
    """A node could not start its ranks; the driver turns it into a `PreflightError`."""


class NodeLost(NodeError):
    """A node could not start its ranks because another one has gone; the other one is the cause."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A place for forkservers that the driver and the executors of a local master share.

    Attributes:
        base: Folder in which forkservers have theirs.
        root: Folder that holds the sparkdist package.
        pid: The driver, which forkservers end with.
    """

    base: str
    root: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class Packages:
    """The ranks' Python packages, in a folder that was unpacked from an archive.

    Attributes:
        name: The folder's name, which holds the archive's digest.
        label: What the user calls it, for messages.
        python: Path of its interpreter within the folder; "" where the folder holds packages for
            the node's own interpreter.
    """

    name: str
    label: str
    python: str


@dataclass(frozen=True, kw_only=True)
class Order:
    """One attempt of a run, as data.

    Attributes:
        run_id: The run.
        attempt: 0 for the first try.
        framework: Name of the plug-in, with `launcher`.
        launcher: `"fast"` or a launcher of the framework's own.
        launcher_args: That launcher's options.
        world_size: Ranks in the gang.
        tasks: Spark tasks in the gang; 1 on the driver.
        processes_per_task: Ranks in one task; the last task may hold fewer.
        gpus_per_task: GPUs that Spark gives each task, one for each of its ranks; 0 for the CPU.
        script: The script's path and its arguments; None for a function. A relative path is
            inside the parcel.
        env: What `env` and `forward_env` set, already merged.
        threads: Cores for each rank.
        control: Where the driver's control channel listens, or None.
        token: Proves to the control channel that an agent belongs to this run.
        logs: Which ranks' lines go to the driver: `"all"`, `"rank0"` or `"none"`.
        idle_timeout: Seconds without a run after which a forkserver ends.
        host: The driver's own place for forkservers where executors are in its JVM, so that it
            can start one before Spark has started its Python workers; else None.
        logs_json: Whether what ranks say through Python's logging is wanted as data.
        ports: The first and last port that the gang's store may listen on; None for any.
        packages: The environment that travels with the application, or None for the nodes' own.
        versions: What the driver has and nodes must have too: versions by name, such as "Python".
        max_restarts: How many failures start the gang again, as ranks are told.
        stall_timeout: Seconds without a sign of life after which a rank is silent; None for any time.
        modules: Installed modules that the user's code imports on its way to its first line.
        keep: Seconds for which what ranks keep stays on their nodes for another attempt; 0 for none.
        faults: Failures that the user wants, of any rank and attempt.
    """

    run_id: str
    attempt: int
    framework: str
    launcher: str
    launcher_args: tuple[str, ...]
    world_size: int
    tasks: int
    processes_per_task: int
    script: tuple[str, ...] | None
    env: dict[str, str] = field(repr=False)
    threads: int
    control: tuple[str, int] | None
    token: str = field(repr=False)
    logs: str
    idle_timeout: float
    host: Host | None = None
    gpus_per_task: int = 0
    ports: tuple[int, int] | None = None
    logs_json: bool = False
    packages: Packages | None = None
    versions: dict[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    stall_timeout: float | None = None
    modules: tuple[str, ...] = ()
    keep: float = 0.0
    faults: tuple[Fault, ...] = ()

    def to_json(self) -> str:
        """Returns the order as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Order:
        """Makes the order that `to_json` wrote."""
        fields = json.loads(text)
        for name in ("launcher_args", "script", "control", "ports", "modules"):
            if fields[name] is not None:
                fields[name] = tuple(fields[name])
        if fields["host"] is not None:
            fields["host"] = Host(**fields["host"])
        if fields["packages"] is not None:
            fields["packages"] = Packages(**fields["packages"])
        fields["faults"] = tuple(Fault(**fault) for fault in fields["faults"])
        return cls(**fields)
