"""The examples, run as a user runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
EPOCH = r"epoch +(\d+)/8  loss \d+\.\d{4}  test accuracy (\d+\.\d\d)%"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_training_script_reaches_its_target_under_torchrun():
    ended = run(*TORCHRUN, str(EXAMPLES / "train_digits.py"))
    assert ended.returncode == 0, ended.stderr
    epochs = re.findall(f"^{EPOCH}$", ended.stdout, re.MULTILINE)
    assert [number for number, _ in epochs] == list("12345678")  # by rank 0 alone
    assert float(epochs[-1][1]) >= 97


@pytest.mark.slow
def test_training_script_fails_below_its_target():
    ended = run(*TORCHRUN, str(EXAMPLES / "train_digits.py"), "--epochs=1", "--target=1.01")
    assert ended.returncode != 0
    assert re.search(r"test accuracy \d+\.\d\d% is below the target of 101\.00%", ended.stderr)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_demo_trains_on_spark_and_shows_where_the_time_went():
    ended = run(str(EXAMPLES / "digits.py"))
    assert ended.returncode == 0, ended.stderr
    by_engine = re.findall(rf"^\[rank 0\] {EPOCH}$", ended.stdout, re.MULTILINE)
    assert [number for number, _ in by_engine] == list("12345678") * 2
    by_torchrun = re.findall(f"^{EPOCH}$", ended.stdout, re.MULTILINE)
    assert [number for number, _ in by_torchrun] == list("12345678")
    assert all(float(run[1]) >= 97 for run in (by_engine[7], by_engine[15], by_torchrun[7]))
    for row in ("slots", "start", "training", "results", "total"):
        assert re.search(rf"{row}\b.*\d+\.\d\d .*\d+\.\d\d ", ended.stdout), row
    assert re.search(r"compared with torchrun(.*\d\.\d\d x){2}.*1\.00 x", ended.stdout)
