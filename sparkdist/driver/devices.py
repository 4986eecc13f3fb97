"""The GPUs of the driver, found without importing a framework or opening a device."""

from __future__ import annotations

import os
import re
import subprocess

from sparkdist.errors import ConfigurationError

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
