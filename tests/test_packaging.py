"""What is installed and shipped is what setup.cfg, constraints.txt and LICENSE say."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def config() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


@pytest.fixture(scope="module")
def pins() -> dict[str, Version]:
    found: dict[str, Version] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, equals, version = line.partition("==")
            assert equals, f"{line!r} is not a pin"
            found[canonicalize_name(name)] = Version(version)
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to build from: a build in place would leave its traces in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "sparkdist", copy / "sparkdist", ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def run(*command: str | Path, cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def needed(requirement: Requirement, seen: dict[str, set[str]]) -> None:
    """Walks what a requirement brings in, by the metadata of what is installed."""
    name = canonicalize_name(requirement.name)
    extras = requirement.extras | {""}
    if extras <= seen.get(name, set()):
        return
    seen.setdefault(name, set()).update(extras)
    for text in metadata.requires(name) or []:
        below = Requirement(text)
        if not below.marker or any(below.marker.evaluate({"extra": extra}) for extra in extras):
            needed(below, seen)


def test_the_installed_version_is_setup_cfgs(config):
    assert metadata.version("sparkdist") == config["metadata"]["version"]


def test_every_extra_can_be_met_by_its_pins(config, pins):
    extras = dict(config["options.extras_require"])
    extras["core"] = config["options"]["install_requires"]
    for extra, lines in extras.items():
        for line in lines.strip().splitlines():
            requirement = Requirement(line)
            if requirement.name == "sparkdist":
                assert requirement.extras <= set(extras)
            else:
                pin = pins[canonicalize_name(requirement.name)]
                assert requirement.specifier.contains(pin), f"{extra}: {line} against {pin}"


def test_whatever_dev_brings_in_is_installed_as_pinned(pins):
    seen: dict[str, set[str]] = {}
    needed(Requirement("sparkdist[dev]"), seen)
    del seen["sparkdist"]
    assert {"torch", "py4j", "numpy", "pluggy"} <= set(seen)  # the walk went deep
    # `public` leaves out the build label: 2.13.0+cpu is as good as 2.13.0.
    installed = {name: Version(Version(metadata.version(name)).public) for name in seen}
    assert installed == {name: pins.get(name) for name in seen}


def test_the_wheel_carries_types_and_licence(config, source, tmp_path):
    run("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, source, cwd=source)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"sparkdist-{config['metadata']['version']}-py3-none-any")
    names = zipfile.ZipFile(wheel).namelist()
    assert "sparkdist/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    shipped = {name for name in names if name.endswith(".py")}
    assert shipped == {str(path.relative_to(source)) for path in source.glob("sparkdist/**/*.py")}


def test_the_source_distribution_carries_types_and_licence(source, tmp_path):
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    run("-c", build, cwd=source)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"sparkdist/py.typed", "LICENSE", "README.md", "setup.py", "setup.cfg"} <= names


def test_the_licence_is_the_whole_apache_2_0():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "9. Accepting Warranty or Additional Liability." in text


def test_compose_names_files_that_exist():
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    services = compose["services"]
    assert {"master", "worker-1", "worker-2"} <= set(services)
    for service in services.values():
        context = (ROOT / "docker" / service["build"]["context"]).resolve()
        assert context == ROOT
        assert (context / service["build"]["dockerfile"]).is_file()
        for volume in service.get("volumes", []):
            assert (ROOT / "docker" / volume.split(":")[0]).exists()
