"""`environment=` and the checks on executors, from a client of Spark Connect."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from sparkdist import Launcher, PreflightError
from tests.test_packages import OURS, Packer, launcher, looker, refusal, relinked, wheel

pytestmark = pytest.mark.slow


def test_ranks_run_in_a_packed_environment(spark, clean, tmp_path):
    archive = Packer(tmp_path).pack("env", OURS)
    for _ in range(2):  # cold, then warm
        for own, child in launcher(False, archive).launch(looker()).values:
            assert "sparkdist-environment-" in own[0]
            assert own[1:] == (str(Path(own[0]).parents[1]), "packed", "ours")
            assert child == ["ours", "packed"]
    assert launcher(False, None).run(lambda: sys.prefix) == sys.prefix


def test_requirements(spark, clean, tmp_path):
    def where():
        import packed_module

        return packed_module.WHERE

    listed = [str(wheel(tmp_path, "packed_module", "WHERE = 'packed'"))]
    assert launcher(False, listed).launch(where).values == ["packed", "packed"]


def test_a_dangling_interpreter(spark, clean, tmp_path):
    archive = relinked(Packer(tmp_path).pack("env"), "/nowhere/python")
    assert f"cannot be used on {socket.gethostname()}" in refusal(launcher(False, archive), os.getpid)


def test_a_module_that_only_the_driver_has(spark, clean, tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "onlyhere.py").touch()
    monkeypatch.syspath_prepend(folder)

    def inside():
        import onlyhere  # noqa: F401

    with pytest.raises(PreflightError, match="has no onlyhere, which the user's code imports"):
        Launcher("plain", num_processes=2, local_mode=False).run(inside)
