"""What ranks run in these tests. Only the standard library at module level: ranks start at once."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


def rank() -> int:
    return int(os.environ["RANK"])


def report(count: int = 1) -> int:
    """Reports some steps."""
    import sparkdist

    for step in range(count):
        sparkdist.report({"loss": 1 / (1 + step)}, step=step)
    return rank()


# --- where a fault happens ----------------------------------------------------------------------


def beside_a_sleeper(moment: Path, fault: Callable[..., Any], *args: Any) -> Any:
    """A fault in rank 1 while every other rank waits for ever."""
    if rank() != 1:
        threading.Event().wait()
    moment.touch()
    return fault(*args)


def beside_a_collective(moment: Path, fault: Callable[..., Any], *args: Any) -> Any:
    """A fault in rank 1 while every other rank waits for it in a collective."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()  # from here on they have nothing to do but to enter the next one
    if rank() == 1:
        moment.touch()
        fault(*args)
    dist.barrier()


def beside(
    doing: Callable[[Callable[[], None]], Any], moment: Path, fault: Callable[..., Any], *args: Any
) -> Any:
    """A fault in rank 1 as soon as every other rank is at what it does for ever."""
    if rank() != 1:
        doing((moment.parent / f"at-it-{rank()}").touch)
    others = {f"at-it-{other}" for other in range(int(os.environ["WORLD_SIZE"])) if other != 1}
    while not others <= set(os.listdir(moment.parent)):
        time.sleep(0.01)
    moment.touch()
    return fault(*args)


def compute(say: Callable[[], None]) -> NoReturn:
    say()
    spin_for_ever()


def compute_in_c(say: Callable[[], None]) -> None:
    say()
    spin_in_c()


def be_deaf(say: Callable[[], None]) -> NoReturn:
    """Cannot be asked to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say()
    sleep_for_ever()


# --- exceptions ---------------------------------------------------------------------------------


class Custom(Exception):
    """Pickles, and comes back as what it was."""


class Strict(Exception):
    """Pickles, but does not unpickle: its `args` are not what its `__init__` takes."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})")


class Forgetful(Exception):
    """Comes back with another text."""

    def __reduce__(self) -> Any:
        return Forgetful, ()


class Disguised(Exception):
    """Comes back as something that is no exception."""

    def __reduce__(self) -> Any:
        return str, ("gone",)


class Mute(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no comment")


def holding_a_lock(text: str) -> Exception:
    return ValueError(text, threading.Lock())


def raise_it(kind: Callable[..., BaseException], *args: Any) -> NoReturn:
    raise kind(*args)


def raise_it_large(size: int) -> NoReturn:
    raise ValueError("x" * size)


class Unpickled:
    """Calls something where it is unpickled: on a rank, before the function is entered."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self.call = call, args

    def __reduce__(self) -> Any:
        return self.call


def fail_on_a_rank() -> NoReturn:
    raise LookupError("not here")


def raise_chained() -> NoReturn:
    try:
        raise_it(KeyError, "inner")
    except KeyError as cause:
        raise ValueError("outer") from cause


# --- ends ---------------------------------------------------------------------------------------


def kill_itself(number: int) -> NoReturn:
    os.kill(os.getpid(), number)
    signal.pause()
    raise AssertionError


def say_and_die(text: str) -> NoReturn:
    print(text)
    kill_itself(signal.SIGKILL)


def segfault() -> None:
    ctypes.string_at(0)


def eat_a_gigabyte() -> int:
    """Writes to that much memory: pages that are only reserved count for nothing."""
    return len(bytearray(os.urandom(1 << 20)) * 1024)


# --- results ------------------------------------------------------------------------------------


class Fragile:
    """Pickles on a rank; does not unpickle where RANK is not set."""

    def __reduce__(self) -> Any:
        return rank, ()


def value_of_rank_1(make: Callable[..., Any], *args: Any) -> Any:
    return make(*args) if rank() == 1 else None


def random_bytes(size: int) -> tuple[str, bytes]:
    import hashlib

    data = os.urandom(1 << 20) * (size >> 20)
    return hashlib.sha256(data).hexdigest(), data


# --- waits --------------------------------------------------------------------------------------


def spin_for_ever() -> NoReturn:
    while True:
        pass


def sleep_for_ever() -> NoReturn:
    while True:
        time.sleep(3600)


def spin_beside_a_thread() -> NoReturn:
    threading.Thread(target=sleep_for_ever, daemon=True).start()
    spin_for_ever()


def ignore_sigterm() -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep_for_ever()


def spin_in_c() -> None:
    """Never leaves C and holds the GIL: no other Python code can run in this process."""
    sum(range(10**18))


def stop_itself() -> NoReturn:
    kill_itself(signal.SIGSTOP)


def one_each(first: Callable[[], Any], second: Callable[[], Any]) -> Any:
    return first() if rank() == 0 else second()


def block_rank_1() -> None:
    if rank() == 1:
        sleep_for_ever()


def block_rank_0_once(folder: Path) -> None:
    """Blocks rank 0 of the first attempt, once a file of its own says so."""
    if rank() == 0 and os.environ["SPARKDIST_ATTEMPT"] == "0":
        announce_in(folder, 0)
        sleep_for_ever()


def come_late(waiting: Path) -> Path:
    """Blocks rank 1 until the other rank waits for it."""
    while rank() == 1 and not waiting.exists():
        time.sleep(0.01)
    return waiting


def meet(waiting: Any) -> float:
    """Sums a 1 of every rank."""
    import torch
    import torch.distributed as dist

    waiting.touch()
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)


def return_early(folder: Path) -> str:
    """Rank 0 returns; rank 1 goes on until that process is gone, and then uses the gang's store."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    announce(folder)
    dist.barrier()
    if rank() == 1:
        first = (folder / "0").read_text()
        while Path(f"/proc/{first}").exists():
            time.sleep(0.01)
        store.set("late", "still there")
        return store.get("late").decode()
    return "early"


def take(value: object) -> None: ...


def announce_and_wait(folder: Path, ignore: bool = False) -> NoReturn:
    """Waits for ever, once a file of its own says so; may only note that it was asked to end."""
    if ignore:
        signal.signal(signal.SIGTERM, lambda number, frame: Path(folder, f"asked-{rank()}").touch())
    announce(folder)
    sleep_for_ever()


def announce(folder: Path) -> None:
    """Writes this rank's pid to a file that appears whole."""
    draft = folder / f".{rank()}"
    draft.write_text(str(os.getpid()))
    draft.rename(folder / str(rank()))


def announce_in(folder: Path, attempt: int) -> None:
    """Announces this rank of an attempt."""
    below = folder / str(attempt)
    below.mkdir(exist_ok=True)
    announce(below)


def announce_and_return(folder: Path, go: Path) -> int:
    """Returns when it is told to."""
    announce(folder)
    while not go.exists():
        time.sleep(0.01)
    return rank()


def stop_rank_1() -> None:
    if rank() == 1:
        stop_itself()


# --- stalls -------------------------------------------------------------------------------------


def say_and_stop(text: str) -> NoReturn:
    print(text)
    stop_itself()


def lock_itself_out() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def sleep_in_c() -> None:
    """Holds the GIL, so that no other Python code can run in this process; any signal ends it."""
    ctypes.PyDLL(None).sleep(3600)


def sleep_in_the_kernel(fifo: Path) -> None:
    """Sleeps such that no signal but SIGKILL is heard: until a child has opened a pipe without a writer."""
    os.mkfifo(fifo)
    action = (os.POSIX_SPAWN_OPEN, 0, str(fifo), os.O_RDONLY, 0)
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[action])


def enter_different_collectives() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    if rank() == 0:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(1))


def wait_for_a_key_and_a_tensor() -> None:
    """Waits in C alone: torch has no Python function around these."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    if rank() == 0:
        dist.distributed_c10d._get_default_store().get("never")
    else:
        dist.irecv(torch.ones(1), 0).wait()  # type: ignore[union-attr]


def reduce_gradients_without_rank_1() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model: Any = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    loss = model(torch.ones(1)).sum()
    if rank() == 1:
        sleep_for_ever()
    loss.backward()


def wait_for_a_key_but_for_rank_1() -> int:
    import torch.distributed as dist

    if rank() == 1:
        return 1
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.wait(["never"])
    return 0


def compute_while_others_wait(seconds: float) -> int:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if rank() == 1:
        spin_for(seconds)
    dist.barrier()
    return rank()


def spin_for(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def compute_but_for_rank_1(seconds: float) -> int:
    if rank() != 1:
        spin_for(seconds)
    return rank()


def do_little(seconds: float) -> int:
    """Takes hardly any time of the CPU: prints, reads a file, waits for a busy DataLoader."""
    end = time.monotonic() + seconds
    little = (print_one_line, read_a_little, load_slowly)[rank()]
    while time.monotonic() < end:
        little()
    return rank()


def print_one_line() -> None:
    time.sleep(0.2)
    print("still here")


def read_a_little() -> None:
    time.sleep(0.2)
    Path("/etc/hostname").read_bytes()


def load_slowly() -> None:
    import torch

    data: Any = SlowItems(3.0)
    list(torch.utils.data.DataLoader(data, num_workers=1))


class SlowItems:
    """One item that takes long to make."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        spin_for(self._seconds)
        return index


# --- leftovers ----------------------------------------------------------------------------------


def leave_a_thread() -> int:
    threading.Thread(target=sleep_for_ever).start()
    return rank()


def leave_a_daemon(folder: Path) -> int:
    """Leaves a process in a session of its own whose parent is gone."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        (folder / str(rank())).write_text(str(os.getpid()))
        os.close(writer)
        sleep_for_ever()
    os.close(writer)
    os.read(reader, 1)  # until it has written its pid
    return rank()


def leave_a_data_loader() -> int:
    import torch

    data: Any = list(range(8))
    loader = torch.utils.data.DataLoader(data, num_workers=1, persistent_workers=True)
    leave_a_data_loader.kept = iter(loader)  # type: ignore[attr-defined]
    next(leave_a_data_loader.kept)  # type: ignore[attr-defined]
    return rank()


def leave_a_reader_of_stdout() -> int:
    """Leaves a process that holds this rank's stdout and stderr open."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    return rank()


# --- output -------------------------------------------------------------------------------------


def print_lines(count: int, megabytes_per_second: float) -> None:
    """Prints lines of 100 bytes, by turns to stdout and stderr, at a steady pace."""
    began = time.monotonic()
    for i in range(count):
        stream = sys.stderr if i % 2 else sys.stdout
        print(f"{i:08}".ljust(99, "."), file=stream)
        if i % 100 == 0:
            ahead = i * 100 / (megabytes_per_second * 1e6) - (time.monotonic() - began)
            time.sleep(max(0.0, ahead))


BLOCK = "".join(f"{i:08}".ljust(99, ".") + "\n" for i in range(640)).encode()  # lines of 100 bytes


def shout(blocks: int) -> tuple[float, int, int]:
    """Prints 640 lines so many times; returns the seconds, and its agent's memory before and at most (kB)."""
    agent = Path(f"/proc/{os.getppid()}")
    before, began = _kilobytes(agent, "VmRSS"), time.monotonic()
    (agent / "clear_refs").write_text("5")  # forgets the peak
    if rank() == 1:
        for _ in range(blocks):
            _write_all(BLOCK)
    return time.monotonic() - began, before, _kilobytes(agent, "VmHWM")


def print_without_end(megabytes: int) -> int:
    """Prints one line of so many MB; returns the peak of its agent's memory (kB)."""
    if rank() == 1:
        for _ in range(megabytes):
            _write_all(b"x" * (1 << 20))
        _write_all(b"\n")
    return _kilobytes(Path(f"/proc/{os.getppid()}"), "VmHWM")


def _write_all(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def _kilobytes(process: Path, name: str) -> int:
    return int((process / "status").read_text().partition(f"{name}:")[2].split()[0])


def memory(process: str = "self") -> tuple[int, int]:
    """A process's memory and its peak (kB)."""
    return _kilobytes(Path("/proc", process), "VmRSS"), _kilobytes(Path("/proc", process), "VmHWM")
