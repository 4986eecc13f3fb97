"""What a forkserver imports, and whether it may fork then: threads or a device in it would hang ranks."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from sparkdist import values
from sparkdist.executor import checks
from sparkdist.executor.shortage import shortage

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


def prepare(arguments: Mapping[str, Any]) -> str:
    """Imports what ranks will need; returns why they cannot run in this interpreter, or ""."""
    versions, remedy = arguments["versions"], checks.remedy(arguments["environment"])
    return (
        checks.difference(versions, remedy)
        or import_all(arguments["preload"], remedy)
        or checks.difference(versions, remedy)  # some show only now
    )


def import_all(modules: list[str], remedy: str = "") -> str:
    """Imports modules; returns why that failed, or ""."""
    for module in modules:
        try:
            import_module(module)
        except BaseException as error:
            return (
                f"import {module} failed on {socket.gethostname()} in {sys.executable}: "
                f"{type(error).__name__}: {values.safe_text(error)}. {shortage(error) or remedy}"
            )
    return ""


def safe_to_fork() -> bool:
    """Says whether this process has one thread and no device open."""
    if len(os.listdir("/proc/self/task")) > 1:
        return False
    return not any(os.readlink(f"/proc/self/fd/{fd}").startswith(_DEVICES) for fd in open_fds())


def open_fds() -> set[int]:
    """Returns this process's open descriptors."""
    listed = {int(name) for name in os.listdir("/proc/self/fd")}
    return {fd for fd in listed if os.path.lexists(f"/proc/self/fd/{fd}")}  # not the listing's own
