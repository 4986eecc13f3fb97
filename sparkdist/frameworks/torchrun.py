"""PyTorch through the real torchrun, for those who need its options."""

from __future__ import annotations

import signal

from sparkdist.errors import ConfigurationError
from sparkdist.frameworks.base import Place
from sparkdist.frameworks.torch import Torch

# What the engine decides, or what would put something other than the rank behind torchrun.
_OURS = (
    "nnodes",
    "nproc-per-node",
    "node-rank",
    "master-addr",
    "master-port",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "standalone",
    "local-addr",
    "module",
    "no-python",
    "run-path",
)

_ENDED = (-signal.SIGTERM, -signal.SIGKILL)


class Torchrun(Torch):
    """torch.distributed, started by the torchrun command on each node."""

    preload = (*Torch.preload, "torch.distributed.run")
    has_store = False
    whole_node = True

    def check(self, launcher_args: tuple[str, ...]) -> None:
        """Checks torchrun's options, on the driver and without torch."""
        for arg in launcher_args:
            name = arg.lstrip("-").partition("=")[0].replace("_", "-")
            if arg.startswith("-") and (arg == "-m" or name in _OURS):
                raise ConfigurationError(f"torchrun_args: {arg!r} is decided by sparkdist; leave it out")

    def run_node(self, place: Place, shim: list[str], args: tuple[str, ...]) -> dict[int, int]:
        """Runs torchrun's own entry point in this process."""
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import main

        options = [
            f"--nnodes={place.node_count}",
            f"--nproc-per-node={place.local_world_size}",
            f"--node-rank={place.node}",
            f"--master-addr={place.master_addr}",
            f"--master-port={place.master_port}",
            f"--rdzv-id={place.run_id}",
        ]
        try:
            main([*options, *args, *shim])
        except ChildFailedError as error:
            first, *others = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
            # torchrun names those, too, that it ended because of the first.
            failures = [first, *(other for other in others if other.exitcode not in _ENDED)]
            return {failure.local_rank: failure.exitcode for failure in failures}
        return {}
