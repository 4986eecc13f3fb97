"""Builds Horovod's wheel, once for each plan, installs and removes it."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sparkdist.horovod.build import patches, source
from sparkdist.horovod.build.diagnosis import BuildError
from sparkdist.horovod.build.plan import FLAGS, Plan
from sparkdist.horovod.build.progress import Progress, run_tool
from sparkdist.horovod.build.state import STAMP

_RUNTIME = {"cloudpickle": "cloudpickle", "psutil": "psutil", "pyyaml": "PyYAML", "packaging": "packaging"}

Say = Callable[[str], None]


@dataclass(frozen=True)
class Workshop:
    """Where wheels are built and kept.

    Attributes:
        environ: The environment of the tools.
        say: Tells the user.
        jobs: How many compilers run at a time; None: as MAKEFLAGS says, or one for each core.
    """

    environ: Mapping[str, str]
    say: Say
    jobs: int | None = None

    @property
    def cache(self) -> Path:
        """The folder of the cache."""
        home = self.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return Path(home, "sparkdist", "horovod")

    def log(self, plan: Plan) -> Path:
        """The file with all that the tools say of a plan."""
        return self.cache / "logs" / f"{plan.key}.log"

    def wheel(self, plan: Plan, rebuild: bool = False) -> Path:
        """Returns the plan's wheel, from the cache or built.

        Raises:
            BuildError: The build failed.
        """
        with self._locked(plan.key):
            home = self.cache / plan.key
            if rebuild:
                shutil.rmtree(home, ignore_errors=True)
            if found := next(iter(home.glob("*.whl")), None):
                self.say(f"the wheel is from the cache: {found}")
                return found
            log = self.log(plan)
            log.parent.mkdir(parents=True, exist_ok=True)
            log.unlink(missing_ok=True)
            with tempfile.TemporaryDirectory(prefix="sparkdist-horovod-") as folder:
                built, left_out = self._build(plan, Path(folder), log)
                return self._publish(plan, built, left_out)

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Lets one process at a time build a plan."""
        self.cache.mkdir(parents=True, exist_ok=True)
        with (self.cache / f"{key}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.say("another process builds this wheel; waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _build(self, plan: Plan, folder: Path, log: Path) -> tuple[Path, dict[str, str]]:
        """Returns the wheel, and why which optional frameworks are not in it."""
        environ = source.with_tools(folder / "tools", log, self._environ(plan))
        archive = source.download(plan.version, self.cache / "source", log, environ)
        root = source.unpack(archive, folder)
        needed = patches.apply_edits(root)
        what = " and ".join(f"{name} {number}" for name, number in plan.frameworks.items())
        self.say(f"building Horovod {plan.version} for {what} ({len(needed)} edits; log: {log})")
        try:
            return self._compile(root, folder, log, environ), {}
        except BuildError as error:
            if not plan.optional or plan.optional == plan.frameworks.keys():
                raise
            names = " and ".join(sorted(plan.optional))
            self.say(f"{names} does not compile and was not asked for, so going on without: {error}")
            # What was compiled for the others is still there.
            for name in plan.optional:
                del environ[f"HOROVOD_WITH_{FLAGS[name]}"]
                environ[f"HOROVOD_WITHOUT_{FLAGS[name]}"] = "1"
            compiled = self._compile(root, folder, log, environ)
            return compiled, dict.fromkeys(plan.optional, str(error.args[0]))

    def _environ(self, plan: Plan) -> dict[str, str]:
        environ = {name: value for name, value in self.environ.items() if name not in plan.unset} | dict(
            plan.env
        )
        # Without MAKEFLAGS, Horovod runs 8 compilers; a make that called us left its own there.
        if self.jobs is not None or "MAKELEVEL" in environ or not environ.get("MAKEFLAGS"):
            environ["MAKEFLAGS"] = f"-j{self.jobs or len(os.sched_getaffinity(0))}"
        # Projects within the source ask for CMakes that CMake 4 no longer speaks.
        environ.setdefault("CMAKE_POLICY_VERSION_MINIMUM", "3.5")
        return environ | {"CMAKE_GENERATOR": "Unix Makefiles"}

    def _compile(self, root: Path, folder: Path, log: Path, environ: Mapping[str, str]) -> Path:
        flags: list[str | Path] = [
            "-v",
            "--no-deps",
            "--no-build-isolation",
            "--no-cache-dir",
            "--wheel-dir",
            folder / "dist",
        ]
        progress = Progress("building Horovod")
        try:
            run_tool([*source.PIP, "wheel", *flags, root], log, environ, progress)
        finally:
            progress.close()
        return next((folder / "dist").glob("*.whl"))

    def _publish(self, plan: Plan, built: Path, left_out: Mapping[str, str]) -> Path:
        """Stamps a wheel and puts it into the cache: all of it, or nothing."""
        stamp = {
            "key": plan.key,
            "python": plan.python,
            "compiler": plan.compiler,
            "frameworks": {n: v for n, v in plan.frameworks.items() if n not in left_out},
            "left_out": dict(left_out),
            "variables": dict(plan.env),
        }
        home = self.cache / plan.key
        folder = Path(tempfile.mkdtemp(prefix=".new-", dir=self.cache))
        try:
            _stamped(built, folder / built.name, json.dumps(stamp, indent=1, sort_keys=True).encode())
            folder.rename(home)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return home / built.name

    def install(self, wheel: Path, log: Path) -> None:
        """Installs a wheel over whatever Horovod there is, and the packages that Horovod runs with.

        Raises:
            BuildError: pip failed.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        flags = ["--no-deps", "--force-reinstall", "--no-index"]
        run_tool([*source.PIP, "install", *flags, wheel], log, self.environ)
        if missing := [package for name, package in _RUNTIME.items() if not _has(name)]:
            run_tool([*source.PIP, "install", *missing], log, self.environ)

    def uninstall(self) -> None:
        """Removes Horovod from this Python.

        Raises:
            BuildError: pip failed.
        """
        log = self.cache / "logs" / "uninstall.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        run_tool([*source.PIP, "uninstall", "--yes", "horovod"], log, self.environ)


def _has(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _stamped(wheel: Path, target: Path, stamp: bytes) -> None:
    """Copies a wheel, with our stamp in its dist-info and so in its RECORD: pip removes it with the rest."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(stamp).digest()).rstrip(b"=").decode()
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            data = old.read(item)
            if item.filename.endswith(".dist-info/RECORD"):
                name = item.filename.removesuffix("RECORD") + STAMP
                new.writestr(name, stamp)
                data += f"{name},sha256={digest},{len(stamp)}\n".encode()
            new.writestr(item, data)
