"""What goes wrong with Horovod, from an exception or a log to the cause and the commands that cure it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sparkdist.errors import SparkdistError

BUILD = "sparkdist horovod build"
REBUILD = f"{BUILD} --rebuild"


class BuildError(SparkdistError, RuntimeError):
    """Horovod could not be built, installed or proven.

    Attributes:
        log: The file with all that the tools said, if they ran.
    """

    def __init__(self, message: str, log: Path | None = None) -> None:
        super().__init__(message, log)
        self.log = log

    def __str__(self) -> str:
        return f"{self.args[0]}" + (f" (log: {self.log})" if self.log else "")


@dataclass(frozen=True)
class Diagnosis:
    """A cause, in one line, and what to type.

    Attributes:
        cause: What is wrong.
        commands: The commands that cure it, in order.
    """

    cause: str
    commands: tuple[str, ...]


def diagnose(problem: BaseException | str) -> Diagnosis | None:
    """Returns what an exception or a text of Horovod's means, or None if it is not known.

    Args:
        problem: What `import horovod.torch`, `hvd.init()` or a call raised, or the text of it.
    """
    text = f"{type(problem).__name__}: {problem}" if isinstance(problem, BaseException) else problem
    for pattern, cause, commands in _KNOWN:
        if found := re.search(pattern, text):
            words = {name: _PACKAGES.get(word, word) for name, word in found.groupdict(default="").items()}
            return Diagnosis(
                cause.format_map(words), tuple(command.format_map(words) for command in commands)
            )
    return None


# What Horovod calls PyTorch is the package torch.
_PACKAGES = {"pytorch": "torch"}

_KNOWN: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (r"No module named '?horovod\b(?!\.)", "Horovod is not installed", (BUILD,)),
    (
        r"Extension horovod\.(?P<name>\w+) has not been built",
        "Horovod is installed without its extension for {name}",
        (BUILD + " --with {name}",),
    ),
    (
        r"No module named '?horovod\.(?P<name>torch|tensorflow|mxnet)\.",
        "Horovod's extension for {name} is incomplete",
        (BUILD + " --with {name}",),
    ),
    (
        r"Framework (?P<name>\w+) installed with version (?P<old>\S+) but found version (?P<new>\S+?)\.?\s",
        "Horovod was built against {name} {old}, and {new} is installed",
        (BUILD,),
    ),
    (
        r"undefined symbol: (?P<symbol>\w+)",
        "Horovod was built against another version of its framework (undefined symbol {symbol})",
        (REBUILD,),
    ),
    (
        r"version `(?P<symbol>(?:GLIBCXX|CXXABI|GLIBC)_[\d.]+)' not found",
        "Horovod was built where the C++ library or libc is newer ({symbol}); build it on this machine",
        (REBUILD,),
    ),
    (
        r"(?P<name>lib[\w.+-]+\.so[\w.]*): cannot open shared object file",
        "Horovod was built against {name}, which is not there any more",
        (REBUILD,),
    ),
    (r"Gloo\b.*has not been built", "Horovod was built without gloo", (BUILD + " --with gloo",)),
    (
        r"MPI\b.*has not been built|not been built with MPI",
        "Horovod was built without MPI, which `sparkdist.horovod` does not need; it is built with MPI"
        " where mpicxx is on PATH",
        (
            "apt-get install libopenmpi-dev",
            BUILD + " --with mpi",
        ),
    ),
    (
        r"NCCL\b.*has not been built",
        "Horovod was built without NCCL",
        (BUILD + " --gpu",),
    ),
    (
        r"No module named '?(?:distutils|pkg_resources)\b",
        "this Horovod uses a module that Python or setuptools no longer has; ours does not",
        (REBUILD,),
    ),
    (
        r"No module named '?(?P<name>cloudpickle|psutil|yaml|packaging)\b",
        "Horovod needs {name}, which is missing",
        ("pip install cloudpickle psutil pyyaml packaging",),
    ),
    (
        r"No module named '?(?P<name>torch|tensorflow|mxnet)\b",
        "{name} is not installed",
        ("pip install {name}", BUILD + " --with {name}"),
    ),
)

# In the order in which they tell most; of each the first in a log counts.
_CAUSES = (
    r"Killed signal terminated program \w+.*",
    r"^(?!.*(?:exited-with-error|generation-failed)).*\b(?:fatal )?error: (?!ld returned).*",
    r"CMake Error.*(?:\n\s*\S.*){1,3}",
    r"^.*(?:undefined reference to|cannot find -l).*",
    r"^.*No space left on device.*",
    r"^\s*(?:\w+Error|\w*Exception)\b.*",
    r"^\s*ERROR: .*",
    r"^.*(?:\*\*\* .*|[Pp]ermission denied.*|not found)$",
)


def first_cause(log: str) -> str:
    """Returns the line of a build's log that says why it failed, or "" if none does."""
    for pattern in _CAUSES:
        if found := re.search(pattern, log, re.MULTILINE):
            line = " ".join(found[0].split())
            hint = ": out of memory? --jobs 1 needs least" if line.startswith("Killed signal") else ""
            return line[:400] + hint
    return ""
