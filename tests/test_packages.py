"""`environment=`: ranks run in what was packed, wherever they run. All environments here are real ones."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import sysconfig
import tarfile
import threading
import venv
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import venv_pack

from sparkdist import ConfigurationError, Launcher, PreflightError
from tests.test_reach import run_driver

pytestmark = pytest.mark.slow

HERE = f"python{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(params=[True, False], ids=["driver", "spark"])
def local_mode(request) -> bool:
    if not request.param:
        request.getfixturevalue("spark")
    return request.param


class Packer:
    """Makes environments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def site_packages(self, name: str) -> Path:
        return self.folder / name / "lib" / HERE / "site-packages"

    def pack(self, name: str, files: Mapping[str, str] = {}, suffix: str = ".tar.gz") -> Path:
        """Makes a venv whose site-packages hold these files, and packs it."""
        if not (self.folder / name).exists():
            venv.create(self.folder / name, symlinks=True)
        for file, text in files.items():
            path = self.site_packages(name) / file
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        packed = self.folder / f"{name}{suffix}"
        venv_pack.pack(prefix=str(self.folder / name), output=str(packed), force=True)
        return packed


@pytest.fixture
def packer(tmp_path) -> Packer:
    return Packer(tmp_path)


def launcher(local_mode, environment, name="plain", **settings):
    return Launcher(name, num_processes=2, local_mode=local_mode, environment=environment, **settings)


def refusal(run: Launcher, entry: str | Callable[..., object]) -> str:
    with pytest.raises(PreflightError) as caught:
        run.run(entry)
    return str(caught.value)


# --- archives


def looker():
    """Returns a function that goes by value: nobody has this module's imports in these environments."""

    def look():
        import packed_module

        child = "import packaging, packed_module; print(packaging.WHERE, packed_module.WHERE)"
        import packaging

        return (
            (sys.executable, sys.prefix, packed_module.WHERE, packaging.WHERE),  # type: ignore[attr-defined]
            subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout.split(),
        )

    return look


OURS = {"packed_module.py": "WHERE = 'packed'", "packaging/__init__.py": "WHERE = 'ours'"}


@pytest.mark.parametrize("suffix", [".tar.gz", ".tgz", ".zip"])
def test_ranks_run_in_a_packed_environment(local_mode, clean, packer, suffix):
    # packaging is installed here, too; the environment's wins.
    archive = packer.pack("env", OURS, suffix)
    for _ in range(2):  # cold, then warm
        for own, child in launcher(local_mode, archive).launch(looker()).values:
            assert own[1:] == (str(Path(own[0]).parents[1]), "packed", "ours")
            assert "sparkdist-environment-" in own[0]
            assert child == ["ours", "packed"]
    # It was for these runs only.
    assert launcher(local_mode, None).run(lambda: sys.prefix) == sys.prefix


def test_changed_content_under_the_same_path_is_sent_anew(local_mode, clean, packer):
    def where():
        import packed_module

        return packed_module.WHERE

    for text in ("one", "two"):
        archive = packer.pack("env", {"packed_module.py": f"WHERE = {text!r}"})
        assert launcher(local_mode, archive).run(where) == text


def test_two_archives_of_one_name(clean, tmp_path, spark):
    def where():
        import packed_module

        return packed_module.WHERE

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        archive = Packer(tmp_path / name).pack("env", {"packed_module.py": f"WHERE = {name!r}"})
        assert launcher(False, archive).run(where) == name


def test_a_script_runs_in_it(local_mode, clean, packer, tmp_path):
    script = tmp_path / "train.py"
    out = tmp_path / "out"
    script.write_text(
        "import packed_module, sys\n"
        "import beside\n"
        f"open({str(out)!r}, 'w').write(f'{{packed_module.WHERE}} {{beside.X}} {{sys.prefix}}')\n"
    )
    (tmp_path / "beside.py").write_text("X = 'beside'")
    run = Launcher("plain", local_mode=local_mode, environment=packer.pack("env", OURS))
    run.run(str(script))
    assert out.read_text().startswith("packed beside ")
    assert "sparkdist-environment-" in out.read_text()


def test_what_executors_have_on_their_path_does_not_win(clean, packer, tmp_path, spark, monkeypatch):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/packed_module.py").write_text("WHERE = 'the executor'")
    (tmp_path / "theirs/only_theirs.py").write_text("")
    monkeypatch.setitem(spark.sparkContext.environment, "PYTHONPATH", str(tmp_path / "theirs"))

    def where():
        import only_theirs  # noqa: F401
        import packed_module

        return packed_module.WHERE

    assert launcher(False, packer.pack("env", OURS)).run(where) == "packed"
    assert launcher(False, None).run(where) == "the executor"


@pytest.mark.parametrize("way", ["fast", "torchrun"])
def test_torch_from_the_environment(clean, packer, spark, way):
    # Packing torch itself would take minutes: the environment refers to the one that is here.
    venv.create(packer.folder / "env", symlinks=True)
    more = f"import sys; sys.path.append({sysconfig.get_path('purelib')!r})\n"
    (packer.site_packages("env") / "more.pth").write_text(more)

    def all_reduce():
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        return int(total), sys.prefix

    run = launcher(False, packer.pack("env"), "torch", launcher=way)
    for total, prefix in run.launch(all_reduce).values:
        assert total == 2
        assert "sparkdist-environment-" in prefix


def test_conda_unpack_runs_once(local_mode, clean, packer, tmp_path):
    venv.create(packer.folder / "env", symlinks=True)
    script = packer.folder / "env/bin/conda-unpack"
    script.write_text(f"open({str(tmp_path / 'unpacked')!r}, 'a').write('once')")
    archive = packer.pack("env", {"packed_module.py": ""})
    for idle_timeout in (600, 601):  # two servers
        launcher(local_mode, archive, idle_timeout=idle_timeout).run(os.getpid)
    assert (tmp_path / "unpacked").read_text() == "once"


# --- environments that cannot run


def relinked(archive: Path, target: str) -> Path:
    """Has an archive's interpreter lead elsewhere, as on a host that has another one there."""
    changed = archive.with_name("relinked.tar.gz")
    with tarfile.open(archive) as old, tarfile.open(changed, "w:gz") as new:
        for info in old:
            if info.name.startswith("bin/python") and info.linkname.startswith("/"):
                info.linkname = target
            new.addfile(info, old.extractfile(info) if info.isreg() else None)
    return changed


def test_a_dangling_interpreter(local_mode, clean, packer):
    archive = relinked(packer.pack("env"), "/nowhere/python")
    message = refusal(launcher(local_mode, archive), os.getpid)
    assert str(archive) in message
    assert f"cannot be used on {socket.gethostname()}" in message
    assert "install that one at the same place" in message


def test_an_interpreter_that_does_not_start(local_mode, clean, packer):
    archive = relinked(packer.pack("env"), "/bin/false")
    assert "does not run in" in refusal(launcher(local_mode, archive), os.getpid)


def test_an_interpreter_of_another_version(local_mode, clean, packer, other_python):
    archive = relinked(packer.pack("env"), str(other_python.path))
    message = refusal(launcher(local_mode, archive), os.getpid)
    assert f"runs Python {other_python.version} on {socket.gethostname()}" in message
    assert f"the driver runs {HERE.removeprefix('python')}" in message


def test_another_pyspark_in_the_environment(local_mode, clean, packer):
    archive = packer.pack(
        "env",
        {"pyspark/__init__.py": "__version__ = '3.0.1'", "pyspark/cloudpickle.py": "__version__ = '1.4'"},
    )
    message = refusal(launcher(local_mode, archive), os.getpid)
    assert "has pyspark 3.0.1, the driver has pyspark " in message
    assert str(archive) in message


def test_a_framework_that_the_environment_lacks(local_mode, clean, packer):
    archive = packer.pack("env")
    message = refusal(launcher(local_mode, archive, "torch"), os.getpid)
    assert "has no torch, the driver has torch " in message
    assert str(archive) in message


def test_a_package_that_the_environment_lacks(local_mode, clean, packer):
    def uses_pytest():
        return pytest.__name__

    archive = packer.pack("env")
    message = refusal(launcher(local_mode, archive), uses_pytest)
    assert f"the Python of {socket.gethostname()} (" in message
    assert "has no pytest, which the user's code imports" in message
    assert str(archive) in message


# --- requirements


def wheel(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as out:
        out.writestr(f"{name}.py", text)
        out.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        out.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        out.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return path


def test_requirements_are_resolved_once_and_win(local_mode, clean, tmp_path, capfd):
    wheel(tmp_path, "packed_module", "WHERE = 'packed'")
    wheel(tmp_path, "packaging", "WHERE = 'ours'")
    listed = ["--no-index", f"--find-links {tmp_path}", "packed_module", "packaging==1.0"]
    for _ in range(2):
        for own, child in launcher(local_mode, listed).launch(looker()).values:
            assert own == (sys.executable, sys.prefix, "packed", "ours")
            assert child == ["ours", "packed"]
    assert capfd.readouterr().err.count("sparkdist: resolving") == 1


def test_two_threads_resolve_one_list_once(tmp_path, capfd):
    listed = [str(wheel(tmp_path, "packed_module", "WHERE = 'packed'"))]
    found = []

    def where():
        import packed_module

        return packed_module.WHERE

    threads = [
        threading.Thread(target=lambda: found.append(launcher(True, listed).run(where))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["packed", "packed"]
    assert capfd.readouterr().err.count("sparkdist: resolving") == 1


def test_what_pip_says_of_a_list_that_cannot_be_resolved(tmp_path, local_mode):
    with pytest.raises(ConfigurationError) as caught:
        launcher(local_mode, ["--no-index", f"--find-links {tmp_path}", "no-such-package==7.7"]).run(
            os.getpid
        )
    assert "No matching distribution found for no-such-package==7.7" in str(caught.value)


def test_a_package_that_the_list_lacks_is_the_executors_own(local_mode, clean, tmp_path):
    def uses_pytest():
        return pytest.__name__

    assert launcher(local_mode, [str(wheel(tmp_path, "packed_module", ""))]).run(uses_pytest) == "pytest"


# --- executors in processes of their own

CLUSTER = """
import json, os, sys, traceback

sys.path.append(sys.argv[1])
from pyspark.sql import SparkSession
from sparkdist import Launcher

spark = (
    SparkSession.builder.master("local-cluster[2,1,1024]")
    .config("spark.ui.enabled", False)
    .config("spark.driver.host", "127.0.0.1")
    .getOrCreate()
)


def look():
    import packed_module

    return packed_module.WHERE, sys.prefix


def told(environment):
    try:
        return Launcher("plain", num_processes=2, environment=environment).launch(look).values
    except Exception:
        return traceback.format_exc()


folder = sys.argv[0] + "/../../"
answers = {
    "packed": told(folder + "env.tar.gz"),
    "resolved": told([folder + "packed_module-1.0-py3-none-any.whl"]),
    "broken": told(folder + "broken/relinked.tar.gz"),
}
json.dump(answers, open(os.environ["TOLD"], "w"))
spark.stop()
"""


@pytest.mark.slow
def test_on_executors_of_their_own(clean, packer, tmp_path):
    packer.pack("env", {"packed_module.py": "WHERE = 'packed'"})
    wheel(tmp_path, "packed_module", "WHERE = 'resolved'")
    (tmp_path / "broken").mkdir()
    relinked(Packer(tmp_path / "broken").pack("env"), "/nowhere/python")
    answers, _ = run_driver(tmp_path, CLUSTER)
    packed, resolved, broken = answers["packed"], answers["resolved"], answers["broken"]
    assert [where for where, _ in packed] == ["packed"] * 2
    assert len({prefix for _, prefix in packed}) == 2  # each executor unpacked its own
    assert resolved == [["resolved", sys.prefix]] * 2
    assert "PreflightError: the environment " in broken
