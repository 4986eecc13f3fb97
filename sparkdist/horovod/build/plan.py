"""What to build: from what was asked for and what there is to Horovod's variables and a key."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from sparkdist.errors import ConfigurationError
from sparkdist.horovod.build import patches
from sparkdist.horovod.build.diagnosis import BuildError
from sparkdist.horovod.build.toolchain import DISTRIBUTIONS, Toolchain

VERSIONS = ("0.28.0", "0.28.1")
FLAGS = {
    "torch": "PYTORCH",
    "tensorflow": "TENSORFLOW",
    "mxnet": "MXNET",
    "gloo": "GLOO",
    "mpi": "MPI",
}
_GPU_OPERATIONS = tuple(
    f"HOROVOD_GPU_{name}" for name in ("ALLREDUCE", "ALLGATHER", "BROADCAST", "ALLTOALL", "REDUCESCATTER")
)
# Of HOROVOD_*, those that are read at run time only make no other wheel.
_BUILD_VARIABLES = re.compile(
    r"HOROVOD_(?:WITH|WITHOUT|GPU|CUDA|NCCL|ROCM|RCCL|CPU_OPERATIONS|BUILD|DEBUG|ALLOW|LOCAL_VERSION|MPI_HOME)"
    r"|(?:C|CXX|CUDA|LD)FLAGS$|CCL_|MXNET_USE_"
)


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What was asked for.

    Attributes:
        version: Horovod's version.
        gpu: True: with NCCL. False: without. None: where all that takes is there.
        included: Frameworks and backends that have to be there.
        excluded: Those that must not.
    """

    version: str = VERSIONS[-1]
    gpu: bool | None = None
    included: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What will be built.

    Attributes:
        version: Horovod's version.
        python: The interpreter and platform it is for.
        compiler: What compiles it.
        frameworks: The frameworks and their versions.
        optional: Those that may be left out if they do not compile.
        env: The variables for Horovod's build, to be added to the environment.
        unset: The variables to be taken out of it.
        key: The name of the wheel's folder in the cache: other plans have others.
        notes: What to tell.
    """

    version: str
    python: str
    compiler: str
    frameworks: Mapping[str, str]
    optional: frozenset[str]
    env: Mapping[str, str]
    unset: frozenset[str]
    key: str
    notes: tuple[str, ...] = ()


def make_plan(wish: Wish, tools: Toolchain) -> Plan:
    """Returns what to build.

    Raises:
        ConfigurationError: What was asked for cannot be.
        BuildError: Something for it is missing here.
    """
    if wish.version not in VERSIONS:
        raise ConfigurationError(f"Horovod {wish.version} is not supported: {' and '.join(VERSIONS)} are")
    included, excluded = _wanted(wish, tools.environ)
    frameworks = _frameworks(included, excluded, tools)
    backends = _backends(included, excluded, tools)
    gpu_env, unset, notes = _gpu(wish.gpu, tools)
    chosen = {*frameworks, *backends}
    env = {
        f"HOROVOD_{'WITH' if n in chosen else 'WITHOUT'}_{flag}": "1" for n, flag in FLAGS.items()
    } | gpu_env
    # Horovod's CMake reads WITHOUT first, and of both would take that.
    unset |= {f"HOROVOD_{'WITHOUT' if n in chosen else 'WITH'}_{flag}" for n, flag in FLAGS.items()}
    return Plan(
        version=wish.version,
        python=tools.python,
        compiler=tools.compiler,
        frameworks=frameworks,
        optional=frozenset(frameworks) - included - {"torch"},
        env=env,
        unset=frozenset(unset),
        key=_key(wish.version, frameworks, included, env, unset, tools),
        notes=tuple(notes),
    )


def _wanted(wish: Wish, environ: Mapping[str, str]) -> tuple[frozenset[str], frozenset[str]]:
    """Adds what HOROVOD_WITH_* and HOROVOD_WITHOUT_* say to the options, which come first."""
    said = {"WITH": set[str](), "WITHOUT": set[str]()}
    for name, flag in FLAGS.items():
        for word, names in said.items():
            if environ.get(f"HOROVOD_{word}_{flag}") == "1":
                names.add(name)
    included = wish.included | (said["WITH"] - wish.excluded)
    excluded = wish.excluded | (said["WITHOUT"] - wish.included)
    if both := sorted(included & excluded):
        raise ConfigurationError(f"{' and '.join(both)} cannot be both with and without")
    return included, excluded


def _frameworks(included: frozenset[str], excluded: frozenset[str], tools: Toolchain) -> dict[str, str]:
    if missing := sorted((included & DISTRIBUTIONS.keys()) - tools.frameworks.keys()):
        raise BuildError(
            f"{' and '.join(missing)} is not installed in this Python: pip install {' '.join(missing)}"
        )
    chosen = {name: version for name, version in tools.frameworks.items() if name not in excluded}
    if not chosen and tools.frameworks:
        raise ConfigurationError(
            f"there is nothing to build without {' and '.join(sorted(tools.frameworks))}: this Python has no"
            " other framework"
        )
    if not chosen:
        raise BuildError(
            "this Python has neither torch nor TensorFlow to build Horovod for: pip install torch"
        )
    return chosen


def _backends(included: frozenset[str], excluded: frozenset[str], tools: Toolchain) -> set[str]:
    if "mpi" in included and not tools.mpi:
        raise BuildError("MPI's compiler mpicxx is not on PATH: on Debian apt-get install libopenmpi-dev")
    backends = {"gloo", *({"mpi"} if tools.mpi else ())} - excluded
    if not backends:
        raise ConfigurationError("without gloo, Horovod needs MPI, and mpicxx is not on PATH or excluded too")
    return backends


def _gpu(wished: bool | None, tools: Toolchain) -> tuple[dict[str, str], set[str], list[str]]:
    """Returns what NCCL's operations need in the environment, what must not be there, and notes."""
    names = ("HOROVOD_GPU_OPERATIONS", *_GPU_OPERATIONS)
    given = {name for name in names if tools.environ.get(name)}
    if wished is False:
        return {}, set(names), []
    missing = tools.missing_for_gpu()
    if wished is None and not given:
        if not tools.torch_cuda:
            return {}, set(), []
        if missing:
            return {}, set(), [f"without GPU operations, which lack {'; '.join(missing)} (--gpu insists)"]
    if missing:
        raise BuildError(f"a build for GPUs lacks {'; '.join(missing)}")
    env = {} if "HOROVOD_GPU_OPERATIONS" in given else dict.fromkeys(set(_GPU_OPERATIONS) - given, "NCCL")
    cuda = {name: str(tools.cuda) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME") if name not in tools.environ}
    return env | cuda, set(), []


def _key(
    version: str,
    frameworks: Mapping[str, str],
    included: frozenset[str],
    env: Mapping[str, str],
    unset: set[str],
    tools: Toolchain,
) -> str:
    given = {k: v for k, v in tools.environ.items() if _BUILD_VARIABLES.match(k) and k not in unset}
    parts = {
        "python": tools.python,
        "compiler": tools.compiler,
        "mpi": tools.mpi if "HOROVOD_WITH_MPI" in env else None,
        "cuda": [tools.torch_cuda, str(tools.cuda)] if any(name in env for name in _GPU_OPERATIONS) else None,
        "frameworks": dict(frameworks),
        "must": sorted(included & frameworks.keys() - {"torch"}),
        "env": given | dict(env),
        "edits": patches.digest(),
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
    names = "-".join(name + number for name, number in frameworks.items())
    return f"{version}-{tools.python}-{names}-{digest}"
