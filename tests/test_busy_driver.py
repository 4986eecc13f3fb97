"""Training while the driver itself has torch imported and at work, with threads running."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = """
import json, sys, threading
import torch
from pyspark.sql import SparkSession
from sparkdist import TorchDistributor

stop = threading.Event()

def work():
    while not stop.is_set():
        torch.rand(64, 64) @ torch.rand(64, 64)
        stop.wait(0.05)

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
try:
    # Large enough for OpenMP's own threads: a fork of this process would wait for them for ever.
    torch.set_num_threads(2)
    (torch.rand(512, 512) @ torch.rand(512, 512)).sum().item()
    assert torch.get_num_threads() == 2

    def train():
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
        torch.manual_seed(dist.get_rank())
        model = DistributedDataParallel(torch.nn.Linear(256, 256))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(512, 256)).square().mean().backward()
            optimizer.step()
        weights = sum(p.sum().item() for p in model.parameters())
        dist.destroy_process_group()
        return weights

    local_mode, script, folder = json.loads(sys.argv[1])
    if not local_mode:
        SparkSession.builder.master("local[2]").config("spark.ui.enabled", False).getOrCreate()
    distributor = TorchDistributor(2, local_mode=local_mode, use_gpu=False, start_timeout=60, timeout=90)
    for _ in range(2):  # cold and warm
        first, second = distributor.launch(train).values
        assert first == second
    distributor.run(script, folder)
finally:
    stop.set()
print("trained")
"""

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(256, 256))
model(torch.ones(512, 256)).square().mean().backward()
weights = sum(p.grad.sum().item() for p in model.parameters())
open(os.path.join(sys.argv[1], os.environ["RANK"]), "w").write(repr(weights))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("local_mode", [False, True], ids=["spark", "local"])
def test_a_function_and_a_script_beside_a_busy_driver(tmp_path: Path, clean: None, local_mode: bool):
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(SCRIPT)
    out.mkdir()
    root = str(Path(__file__).parents[1])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])}
    command = [sys.executable, "-c", DRIVER, json.dumps([local_mode, str(script), str(out)])]
    done = subprocess.run(command, env=environ, cwd=root, capture_output=True, text=True, timeout=115)
    assert done.stdout.endswith("trained\n"), done.stdout + done.stderr
    assert (out / "0").read_text() == (out / "1").read_text()
