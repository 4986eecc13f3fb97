"""Environments of their own for the `sparkdist horovod` command, and the wheel that CI has built before."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE = Path(sysconfig.get_path("purelib"))
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "sparkdist", "horovod")

KEY = """
import os
from sparkdist.horovod.build.plan import Wish, make_plan
from sparkdist.horovod.build.toolchain import find_toolchain
print(make_plan(Wish(), find_toolchain(os.environ)).key)
"""


@dataclass
class Venv:
    """A virtual environment that sees chosen packages of ours, and no Horovod but its own."""

    home: Path
    env: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        return self.home / "bin" / "python"

    @property
    def site(self) -> Path:
        return next(self.home.glob("lib/python*/site-packages"))

    @property
    def lens(self) -> Path:
        """The folder with links to the packages of ours that it sees."""
        return self.home / "lens"

    def command(self, *args: str) -> list[str]:
        return [str(self.python), "-m", "sparkdist.cli", "horovod", *args]

    def environ(self, **env: str) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT), **self.env, **env}

    def sparkdist(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*args),
            env=self.environ(**env),
            capture_output=True,
            text=True,
            timeout=110,
            cwd=self.home,
        )


def make_venv(home: Path, sees=lambda name: not name.startswith("horovod")) -> Venv:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True, timeout=60)
    venv = Venv(home)
    venv.lens.mkdir()
    for entry in SITE.iterdir():
        if sees(entry.name):
            (venv.lens / entry.name).symlink_to(entry)
    (venv.site / "lens.pth").write_text(f"{venv.lens}\n")
    return venv


@pytest.fixture(scope="session")
def venv(tmp_path_factory):
    """An environment with all that we have, torch included, and Horovod from the cache."""
    made = make_venv(tmp_path_factory.mktemp("venv") / "env")
    # Another wheel than the one that would be installed is none: tests do not compile all of Horovod.
    asked = subprocess.run([made.python, "-c", KEY], env=made.environ(), capture_output=True, text=True)
    if not list(CACHE.glob(f"{asked.stdout.strip()}/*.whl")):
        pytest.fail(
            "these tests install the wheel that `sparkdist horovod build` leaves in its cache: run that;"
            f" it has none for {asked.stdout.strip() or asked.stderr}"
        )
    done = made.sparkdist("build")
    assert done.returncode == 0, done.stderr
    made.first = done.stdout  # type: ignore[attr-defined]
    return made


@pytest.fixture
def empty(tmp_path):
    """An environment without any framework."""
    return make_venv(tmp_path / "empty", lambda name: name.startswith("click"))


@pytest.fixture
def fresh_cache(tmp_path):
    """The variables for a cache that holds the source only: what is built stays out of the real one."""
    source = tmp_path / "cache" / "sparkdist" / "horovod" / "source"
    shutil.copytree(CACHE / "source", source)
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}
