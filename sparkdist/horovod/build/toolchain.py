"""What this machine and interpreter have to build Horovod with and for. Nothing is imported for it."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sparkdist.horovod.build.diagnosis import BuildError

# The distributions that may bring a framework.
DISTRIBUTIONS = {
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly", "tensorflow-rocm"),
    "mxnet": ("mxnet", "mxnet-cu112", "mxnet-cu110"),
}
_CUDA_PLACES = ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")


@dataclass(frozen=True)
class Toolchain:
    """What there is.

    Attributes:
        python: Interpreter and platform, as in a wheel's name.
        compiler: The C++ compiler and its version.
        frameworks: Versions of the installed frameworks.
        torch_cuda: The CUDA that torch was built with, or "".
        cuda: The CUDA toolkit's folder, or None.
        mpi: MPI's compiler, or None.
    """

    python: str
    compiler: str
    frameworks: Mapping[str, str]
    torch_cuda: str = ""
    cuda: Path | None = None
    mpi: str | None = None
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)

    def missing_for_gpu(self) -> list[str]:
        """Names what a build with NCCL lacks, each with the package that has it."""
        dashed = "-".join((self.torch_cuda or "12.4").split(".")[:2])
        missing = []
        if "torch" in self.frameworks and not self.torch_cuda:
            missing.append(f"a torch that was built with CUDA ({self.frameworks['torch']} was not)")
        if self.cuda is None:
            missing.append(f"the CUDA compiler nvcc (package cuda-nvcc-{dashed}), or HOROVOD_CUDA_HOME")
        elif not _any_file([self.cuda / "include", *self.cuda.glob("targets/*/include")], "cuda_runtime.h"):
            missing.append(f"cuda_runtime.h below {self.cuda} (package cuda-cudart-dev-{dashed})")
        if not _any_file(self._nccl_folders("HOROVOD_NCCL_INCLUDE", "include"), "nccl.h"):
            missing.append("nccl.h (package libnccl-dev), or HOROVOD_NCCL_HOME")
        libraries = self._nccl_folders("HOROVOD_NCCL_LIB", "lib", "lib64", "lib/*-linux-gnu")
        if not _any_file(libraries, "libnccl.so", "libnccl_static.a"):
            missing.append("libnccl.so or libnccl_static.a (package libnccl-dev), or HOROVOD_NCCL_HOME")
        return missing

    def _nccl_folders(self, variable: str, *names: str) -> list[Path]:
        homes = [Path(home) for home in (self.environ.get("HOROVOD_NCCL_HOME"), self.cuda) if home]
        homes += [Path("/usr"), Path("/usr/local")]
        given = self.environ.get(variable)
        return [*([Path(given)] if given else []), *(p for h in homes for n in names for p in h.glob(n))]


def find_toolchain(environ: Mapping[str, str]) -> Toolchain:
    """Looks for compilers on PATH and for frameworks in this interpreter.

    Raises:
        BuildError: There is no C++ compiler or make, or Python's headers are missing.
    """
    path = environ.get("PATH", os.defpath)
    if shutil.which("make", path=path) is None and shutil.which("gmake", path=path) is None:
        raise BuildError("make is not on PATH. " + _HOW_TO_INSTALL)
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        name = "python{}.{}".format(*sys.version_info)
        raise BuildError(
            f"Python's headers are missing ({sysconfig.get_path('include')}/Python.h): on Debian"
            f" apt-get install {name}-dev, on Red Hat dnf install {name}-devel"
        )
    return Toolchain(
        python=f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}",
        compiler=_compiler(environ, path),
        frameworks=installed_frameworks(),
        torch_cuda=_cuda_of_torch(),
        cuda=_cuda(environ, path),
        mpi=shutil.which("mpicxx", path=path),
        environ=environ,
    )


def installed_frameworks() -> dict[str, str]:
    """Returns the versions of the frameworks that this interpreter has."""
    found: dict[str, str] = {}
    for name, distributions in DISTRIBUTIONS.items():
        for distribution in distributions:
            try:
                found.setdefault(name, version(distribution))
            except PackageNotFoundError:
                continue
    return found


_HOW_TO_INSTALL = (
    "Install a C++ compiler and make: on Debian apt-get install g++ make, on Red Hat dnf install gcc-c++"
    " make, with conda: conda install gxx make"
)


def _compiler(environ: Mapping[str, str], path: str) -> str:
    wanted = shlex.split(environ.get("CXX", "")) or ["c++"]
    # CMake, too, tries several names where CXX is not set.
    names = wanted[:1] if environ.get("CXX") else ["c++", "g++", "clang++"]
    program = next((found for name in names if (found := shutil.which(name, path=path))), None)
    if program is None:
        named = f"CXX={environ['CXX']}" if environ.get("CXX") else "neither c++ nor g++ nor clang++"
        raise BuildError(f"no C++ compiler: {named} is on PATH. " + _HOW_TO_INSTALL)
    # One that cannot even say its version is CMake's to complain of.
    said = subprocess.run(
        [program, *wanted[1:], "--version"], capture_output=True, text=True, env={**environ}
    )
    return said.stdout.partition("\n")[0] or program


def _cuda_of_torch() -> str:
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(folder, "version.py")
        found = re.search(
            r"^cuda\b[^=]*= *'([\d.]+)'", file.read_text() if file.is_file() else "", re.MULTILINE
        )
        if found:
            return found[1]
    return ""


def _cuda(environ: Mapping[str, str], path: str) -> Path | None:
    nvcc = shutil.which("nvcc", path=path)
    places = [environ[name] for name in _CUDA_PLACES if environ.get(name)]
    places += ["/usr/local/cuda", *([str(Path(nvcc).resolve().parents[1])] if nvcc else [])]
    return next((Path(place) for place in places if Path(place, "bin", "nvcc").is_file()), None)


def _any_file(folders: list[Path], *names: str) -> bool:
    return any((folder / name).is_file() for folder in folders for name in names)
