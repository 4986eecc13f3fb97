"""What is seen of an environment's archive before any job, and that it is looked through once."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from sparkdist import ConfigurationError, Launcher, PreflightError
from sparkdist.driver import archive


def tar(path: Path, *members: str | tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as out:
        for member in members:
            info = member if isinstance(member, tarfile.TarInfo) else tarfile.TarInfo(member)
            out.addfile(info, io.BytesIO())
    return path


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def refusal(path: Path, error: type[Exception] = ConfigurationError) -> str:
    with pytest.raises(error) as caught:
        Launcher("plain", local_mode=True, environment=path).run(os.getpid)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("suffix", [".tar.gz", ".tgz", ".zip"])
def test_what_is_no_archive_is_refused(tmp_path, suffix):
    path = tmp_path / f"env{suffix}"
    path.write_bytes(b"no archive at all" * 100)
    assert "damaged or not an archive" in refusal(path)
    path.write_bytes(b"")
    assert "damaged or not an archive" in refusal(path)


def with_python(path: Path, content: bytes) -> Path:
    with tarfile.open(path, "w:gz") as out:
        info = tarfile.TarInfo("bin/python")
        info.size = len(content)
        out.addfile(info, io.BytesIO(content))
    return path


def test_an_archive_that_was_cut_short_is_refused(tmp_path):
    path = with_python(tmp_path / "env.tar.gz", os.urandom(100_000))
    path.write_bytes(path.read_bytes()[:50_000])
    assert "damaged or not an archive" in refusal(path)


def test_flipped_bytes_are_seen(tmp_path):
    path = with_python(tmp_path / "env.tar.gz", b"x" * 100_000)
    data = bytearray(path.read_bytes())
    data[-6] ^= 0xFF  # in the checksum
    path.write_bytes(data)
    assert "damaged or not an archive" in refusal(path)


def test_an_archive_without_python_is_refused(tmp_path):
    # As packed from above the environment's folder, the usual mistake.
    assert "no bin/python at its top" in refusal(tar(tmp_path / "env.tar.gz", "env/bin/python"))


@pytest.mark.parametrize(
    ("member", "word"),
    [
        ("../outside", "lead out"),
        ("/outside", "lead out"),
        ("lib/../../outside", "lead out"),
        (link("lib/hard", "../outside", tarfile.LNKTYPE), "lead out"),
        (link("lib/device", "", tarfile.CHRTYPE), "device"),
    ],
)
def test_members_that_lead_out_are_refused(tmp_path, member, word):
    path = tar(tmp_path / "env.tar.gz", "bin/python", member)
    assert word in refusal(path)
    assert not (tmp_path / "outside").exists()


def test_a_member_behind_a_link_is_refused(tmp_path):
    path = tar(tmp_path / "env.tar.gz", "bin/python", link("lib", str(tmp_path)), "lib/outside")
    assert "behind a link" in refusal(path)


def test_a_file_in_the_place_of_a_link_is_refused(tmp_path):
    path = tar(tmp_path / "a.tar.gz", "bin/python", link("x", "bin/python"), "x")
    assert "holds 'x' again behind a link" in refusal(path)
    hard = link("y", "x", tarfile.LNKTYPE)
    path = tar(tmp_path / "b.tar.gz", "bin/python", link("x", "lib"), hard, "y/file")
    assert "behind a link" in refusal(path)


def test_a_zips_members_are_looked_at_too(tmp_path):
    path = tmp_path / "env.zip"
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("../outside", "")
    assert "lead out" in refusal(path)
    with zipfile.ZipFile(path, "w") as out:
        info = zipfile.ZipInfo("bin/python")
        info.external_attr = 0o120777 << 16
        out.writestr(info, "/usr/bin/python3")
    assert "Pack it as .tar.gz" in refusal(path)


def test_the_links_of_a_venv_are_no_fault(tmp_path):
    path = tar(tmp_path / "env.tar.gz", link("bin/python", "/usr/bin/python3"), link("lib64", "lib"))
    assert archive.examine(path).python == "bin/python"


def test_packages_for_another_python_are_refused(tmp_path):
    path = tar(tmp_path / "env.tar.gz", "bin/python", "lib/python2.7/site-packages/x.py")
    assert "packages for Python 2.7, the driver runs 3." in refusal(path, PreflightError)


def test_an_archive_is_named_by_its_content_and_read_once(tmp_path):
    first, same = tar(tmp_path / "a.tar.gz", "bin/python"), tmp_path / "b.tar.gz"
    same.write_bytes(first.read_bytes())
    content = archive.examine(first)
    assert archive.examine(same).name == content.name
    assert archive.examine(first) is content
    tar(first, "bin/python", "more")
    assert archive.examine(first).name != content.name


def test_an_archive_that_vanished_is_named(tmp_path):
    path = tar(tmp_path / "env.tar.gz", "bin/python")
    launcher = Launcher("plain", local_mode=True, environment=path)
    path.unlink()
    with pytest.raises(ConfigurationError, match=r"cannot read .*env\.tar\.gz"):
        launcher.run(os.getpid)
