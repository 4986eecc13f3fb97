"""In CI a skip is a failure, unless it is listed with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py").read_text()

SKIPS = """
import pytest

@pytest.mark.skip(reason="no such device")
def test_marked(): ...

def test_inside():
    pytest.skip("not today")

@pytest.mark.xfail(reason="a known bug")
def test_expected():
    raise ValueError

@pytest.mark.xfail(reason="fixed since")
def test_fixed(): ...

def test_plain(): ...
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project of its own, with our conftest and an empty list; its runs find `tests.support`."""
    pytester.makeconftest(CONFTEST)
    pytester.path.joinpath("allowed_skips.txt").touch()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    return pytester


def run(project: pytest.Pytester) -> tuple[dict[str, int], str]:
    result = project.runpytest_subprocess("-rA")
    return result.parseoutcomes(), result.stdout.str()


def test_in_ci_every_kind_of_skip_fails_and_says_why(project, monkeypatch):
    monkeypatch.setenv("CI", "true")
    project.makepyfile(test_it=SKIPS)
    outcomes, output = run(project)
    # What is marked to be skipped already ends in the test's set-up, which pytest calls an error.
    assert outcomes == {"errors": 1, "failed": 3, "passed": 1}
    assert "allowed_skips.txt does not list test_it.py::test_marked: " in output
    assert "no such device" in output
    assert "not today" in output
    assert "a known bug" in output


def test_outside_ci_a_skip_is_a_skip(project, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    project.makepyfile(test_it=SKIPS)
    outcomes, _ = run(project)
    assert outcomes == {"skipped": 2, "xfailed": 1, "xpassed": 1, "passed": 1}


def test_what_is_listed_may_be_skipped(project, monkeypatch):
    monkeypatch.setenv("CI", "true")
    project.makepyfile(test_it=SKIPS)
    listed = "# comment\n\ntest_it.py::test_ma*  # needs a device\ntest_it.py::test_expected  # see there\n"
    project.path.joinpath("allowed_skips.txt").write_text(listed)
    outcomes, _ = run(project)
    assert outcomes == {"skipped": 1, "xfailed": 1, "failed": 2, "passed": 1}


def test_a_parameter_can_be_listed_by_its_id(project, monkeypatch):
    monkeypatch.setenv("CI", "true")
    project.makepyfile(
        test_it="""
        import pytest

        @pytest.mark.parametrize("device", ["cpu", "gpu"])
        def test_on(device):
            pytest.skip(device)
        """
    )
    project.path.joinpath("allowed_skips.txt").write_text("test_it.py::test_on[gpu]  # no GPU in CI\n")
    outcomes, output = run(project)
    assert outcomes == {"skipped": 1, "failed": 1}
    assert "does not list test_it.py::test_on[cpu]" in output


def test_in_ci_a_skipped_module_fails(project, monkeypatch):
    monkeypatch.setenv("CI", "true")
    project.makepyfile(test_it="import pytest\npytest.importorskip('no_such_module')\ndef test_x(): ...")
    outcomes, output = run(project)
    assert outcomes == {"errors": 1}
    assert "no_such_module" in output


def test_an_entry_without_a_reason_is_refused(project, monkeypatch):
    monkeypatch.setenv("CI", "true")
    project.makepyfile(test_it=SKIPS)
    project.path.joinpath("allowed_skips.txt").write_text("test_it.py::*\n")
    result = project.runpytest_subprocess()
    assert result.ret != 0
    assert "needs a reason" in result.stdout.str() + result.stderr.str()
