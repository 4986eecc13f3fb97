"""Which ranks wait for others, by stacks that ranks with torch 2.13 printed (our own frames left out)."""

from __future__ import annotations

import pytest

from sparkdist.driver.stall import operation, with_last_lines
from sparkdist.errors import Failure
from sparkdist.frameworks import resolve

SITE = "/opt/lib/python3.11/site-packages"
TORCH, PLAIN = resolve("torch"), resolve("plain")


def stack(*frames: str, head: str = "Current thread 0x00007f5ac04b8b80") -> str:
    """What faulthandler prints for one thread, of "FILE FUNCTION"."""
    pairs = (frame.rsplit(" ", 1) for frame in frames)
    lines = (f'  File "{file}", line 17 in {function}' for file, function in pairs)
    return "\n".join([f"{head} (most recent call first):", *lines, ""])


C10D = f"{SITE}/torch/distributed/distributed_c10d.py"
WRAPPER = f"{SITE}/torch/distributed/c10d_logger.py wrapper"
OURS = "/tmp/sparkdist-3-x/sparkdist-0-0e22/sparkdist/frameworks/torch.py"
FUNCTIONAL = f"{SITE}/torch/distributed/_functional_collectives.py"
PYTREE = f"{SITE}/torch/utils/_pytree.py"
MODULE = f"{SITE}/torch/nn/modules/module.py"
DDP = f"{SITE}/torch/nn/parallel/distributed.py"
BACKWARD = (
    f"{SITE}/torch/autograd/graph.py _engine_run_backward",
    f"{SITE}/torch/autograd/__init__.py backward",
    f"{SITE}/torch/_tensor.py backward",
)
THREADING = "/usr/lib/python3.11/threading.py"
JOIN = (f"{THREADING} _wait_for_tstate_lock", f"{THREADING} join")
USER = "/home/me/train.py main"

WAITS = {
    "barrier": stack(f"{OURS} wait", f"{C10D} barrier", WRAPPER, USER),
    "all_gather_object": stack(
        f"{OURS} wait", f"{C10D} all_gather", WRAPPER, f"{C10D} all_gather_object", WRAPPER, USER
    ),
    "init_process_group": stack(
        f"{C10D} _new_process_group_helper", f"{C10D} init_process_group", WRAPPER, WRAPPER, USER
    ),
    "wait": stack(f"{OURS} wait", USER),
    "get": stack(f"{OURS} get", USER),
    "backward": stack(*BACKWARD, USER),
    "_verify_param_shape_across_processes": stack(
        f"{SITE}/torch/distributed/utils.py _verify_param_shape_across_processes", f"{DDP} __init__", USER
    ),
    "unwrap": stack(
        f"{SITE}/torch/_ops.py __call__",
        f"{FUNCTIONAL} wait_tensor",
        f"{FUNCTIONAL} trigger_wait",
        f"{FUNCTIONAL} unwrap",
        f"{PYTREE} wrapped",
        f"{PYTREE} tree_map",
        f"{FUNCTIONAL} __torch_dispatch__",
        USER,
    ),
}

DOES_NOT_WAIT = {
    "asleep": stack("/home/me/train.py sleep", USER),
    "asleep in what torch.distributed calls": stack(
        "/home/me/train.py sleep",
        f"{SITE}/torch/distributed/elastic/multiprocessing/errors/__init__.py wrapper",
    ),
    "asleep in a model that DDP calls": stack(
        "/home/me/train.py sleep",
        "/home/me/train.py forward",
        f"{MODULE} _call_impl",
        f"{DDP} _run_ddp_forward",
        f"{DDP} forward",
        f"{MODULE} _call_impl",
        USER,
    ),
    "stuck in a layer that DDP calls": stack(
        f"{SITE}/torch/nn/modules/linear.py forward",
        f"{MODULE} _call_impl",
        f"{DDP} _run_ddp_forward",
        f"{DDP} forward",
        USER,
    ),
    "asleep in a hook of backward": stack("/home/me/train.py hook", *BACKWARD, USER),
    "waits for its DataLoader": stack(
        f"{THREADING} wait",
        "/usr/lib/python3.11/multiprocessing/queues.py _feed",
        head="Thread 0x00007f5aa07146c0",
    )
    + "\n"
    + stack(
        "/usr/lib/python3.11/selectors.py select",
        "/usr/lib/python3.11/multiprocessing/connection.py wait",
        f"{SITE}/torch/utils/data/dataloader.py _try_get_data",
        USER,
    ),
    "writes a checkpoint": stack(f"{SITE}/torch/distributed/checkpoint/filesystem.py _write_item", USER),
    "waits for a thread that sleeps": stack("/home/me/train.py sleep", head="Thread 0x1")
    + "\n"
    + stack(*JOIN, USER),
    "could not print": "process 17 is stopped (kernel: do_signal_stop)",
    "printed nothing": "",
}


@pytest.mark.parametrize("name", WAITS)
def test_a_rank_that_waits_for_others(name: str):
    assert operation(WAITS[name], TORCH) == name
    assert operation(WAITS[name], PLAIN) == ""


@pytest.mark.parametrize("what", DOES_NOT_WAIT)
def test_a_rank_that_does_not(what: str):
    assert operation(DOES_NOT_WAIT[what], TORCH) == ""


def test_a_main_thread_that_waits_for_one_that_waits_for_others():
    other = stack(f"{OURS} wait", f"{C10D} barrier", f"{THREADING} run", head="Thread 0x1")
    assert operation(other + "\n" + stack(*JOIN, USER), TORCH) == "barrier"
    # A thread beside one that sleeps is none that it waits for.
    assert operation(other + "\n" + stack("/home/me/train.py sleep", USER), TORCH) == ""


def test_the_main_thread_is_the_last_also_where_another_was_asked():
    helper = stack(head="Thread 0x00007f4ae2f666c0") + "  <no Python frame>\n\n"
    main = stack("/home/me/train.py sleep", USER, head="Thread 0x00007ff163bf0b80")
    assert operation(helper + main, TORCH) == ""
    assert operation(stack(USER) + "\n" + WAITS["barrier"].replace("Current thread", "Thread"), TORCH)


def test_last_lines_come_with_the_rows():
    failures = {rank: Failure(rank=rank, kind="stalled") for rank in (0, 2)}
    rows = [
        ({"kind": "stopped", "rank": 2, "log_tail": ["a", "b"]}, b""),
        ({"kind": "stopped", "rank": 1}, b""),
        ({"kind": "task", "partition": 0}, b""),
    ]
    found = with_last_lines(failures, rows)
    assert {rank: failure.log_tail for rank, failure in found.items()} == {0: (), 2: ("a", "b")}
