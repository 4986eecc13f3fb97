"""Which GPUs a run gets: the driver's, or those that Spark gives its tasks.

The driver's are found without importing a framework or opening a device.
"""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING

from sparkdist.driver.session import Confs
from sparkdist.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile

TASK_GPUS = "spark.task.resource.gpu.amount"

_QUERY_TIME = 20.0  # s; a driver that wakes its GPUs takes a while


def driver_gpus(use_gpu: bool | None, num_processes: int) -> dict[str, str]:
    """Returns the environment that gives each rank on the driver its GPU; empty for none.

    Ranks see the first `num_processes` devices, and choose theirs by LOCAL_RANK.

    Args:
        use_gpu: True to require GPUs, False to leave them alone, None to use them where there are any.
        num_processes: Ranks, one GPU each.

    Raises:
        ConfigurationError: Fewer GPUs than asked for; never a silent reduction.
    """
    if use_gpu is False:
        return {}
    gpus = _visible()
    if not gpus and use_gpu is None:
        return {}
    if len(gpus) < num_processes:
        raise ConfigurationError(
            f"num_processes={num_processes} ranks need as many GPUs, and the driver has {len(gpus)}. Use "
            "fewer processes, or use_gpu=False for the CPU; on Spark executors GPUs are offered by the "
            "conf spark.task.resource.gpu.amount."
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[:num_processes])}


def gpus_per_task(
    use_gpu: bool | None,
    num_processes: int,
    conf: Confs,
    profile: ResourceProfile | None,
) -> int:
    """Returns how many GPUs Spark gives each task of the gang, each for a rank; 0 for ranks on the CPU.

    Args:
        use_gpu: True to require GPUs, False to leave them alone, None to use them where there are any.
        num_processes: Ranks, one GPU each.
        conf: Looks up the session's confs.
        profile: The resource profile of the gang's tasks, whose word counts before the session's.

    Raises:
        ConfigurationError: GPUs were asked for and tasks get none, or not whole ones, or the ranks
            do not fill the tasks.
    """
    if use_gpu is False:
        return 0
    requests = profile.taskResources if profile else {}
    source = "resources=" if requests else f"the conf {TASK_GPUS}"
    amount = requests["gpu"].amount if "gpu" in requests else 0 if requests else float(conf(TASK_GPUS) or 0)
    if not amount and use_gpu:
        raise ConfigurationError(
            f"use_gpu=True, but Spark gives the tasks of this run no GPUs: {source} asks for none. Set "
            f"{TASK_GPUS}, or use_gpu=False (CPU) or None (GPUs where there are any)."
        )
    if amount % 1:
        raise ConfigurationError(
            f"{source} gives a task {amount:g} of a GPU, and ranks do not share one. Set it to a whole "
            "number, or use_gpu=False for the CPU."
        )
    if amount and num_processes % amount:
        raise ConfigurationError(
            f"num_processes={num_processes} is not a multiple of the {amount:g} GPUs that {source} gives "
            f"each task. Ask for {num_processes + int(-num_processes % amount)}, or for one GPU in a task."
        )
    return int(amount)


def _visible() -> list[str]:
    """Returns the identifiers of the GPUs that this process may use."""
    preset = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = _present()
    if preset is None or not present:
        return present
    chosen = [entry.strip() for entry in preset.split(",") if entry.strip()]
    return [] if chosen == ["-1"] else chosen


def _present() -> list[str]:
    command = ["nvidia-smi", "-L"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_TIME, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return re.findall(r"^GPU (\d+):", done.stdout, re.MULTILINE) if done.returncode == 0 else []
