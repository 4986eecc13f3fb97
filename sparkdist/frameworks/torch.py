"""PyTorch: ranks find the environment that torchrun promises.

Source of the contract: "Environment Variables" in PyTorch's documentation of torchrun
(torch.distributed.run), and `torch.distributed.elastic.agent.server.local_elastic_agent`.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from sparkdist.frameworks.base import Framework, Place

TORCHRUN_ENV = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "ROLE_NAME",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
    }
)


class Torch(Framework):
    """torch.distributed, by torchrun's contract."""

    name = "torch"
    distribution = "torch"
    preload: tuple[str, ...] = ("torch", "torch.distributed", "torch.nn.parallel", "torch.utils.data")
    preload_idle = ("torch._dynamo", "torch.distributed.fsdp")  # making a DDP model imports the first: 1 s
    start_env = (*Framework.start_env, "TORCH_*", "PYTORCH_*")
    reserved_env = TORCHRUN_ENV
    # Not all of torch.distributed: it calls the user's code, and writes files. A rank that is silent in
    # backward() waits for the gradients' all-reduce; one that synchronizes with its device for a collective.
    waits = (
        r"/torch/(?:distributed/(?:distributed_c10d|rendezvous|utils|_functional_collectives|device_mesh"
        r"|nn/functional|rpc/\w+|elastic/utils/store)\.py "
        r"|nn/parallel/distributed\.py (?!forward$|_run_ddp_forward$|_call_impl$)"
        r"|autograd/graph\.py _engine_run_backward$|autograd/__init__\.py backward$|_tensor\.py backward$"
        r"|futures/__init__\.py wait|cuda/(?:streams|__init__)\.py synchronize$)"
        r"|/sparkdist/frameworks/torch\.py (?:wait|get|queue_pop|barrier)$"
    )
    has_store = True

    def serve(self, listener: socket.socket) -> None:
        """Serves a TCPStore on `listener`; ranks are its clients, as under torchrun."""
        from torch.distributed import TCPStore

        host, port = listener.getsockname()[:2]
        store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        while store:
            signal.pause()

    def rank_env(self, place: Place) -> dict[str, str]:
        """Returns torchrun's variables for a rank."""
        env = {
            **super().rank_env(place),
            "GROUP_RANK": str(place.node),
            "ROLE_RANK": str(place.rank),
            "ROLE_NAME": "default",
            "GROUP_WORLD_SIZE": str(place.node_count),
            "ROLE_WORLD_SIZE": str(place.world_size),
            "MASTER_ADDR": place.master_addr,
            "MASTER_PORT": str(place.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(place.attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(place.max_restarts),
            "TORCHELASTIC_RUN_ID": place.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_ERROR_FILE": place.error_file,
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "OMP_NUM_THREADS": str(place.threads),
        }
        if place.interface:
            # A host whose name resolves to 127.0.0.1 would otherwise offer loopback to its peers.
            env |= {"GLOO_SOCKET_IFNAME": place.interface, "NCCL_SOCKET_IFNAME": place.interface}
        return env

    def after_fork(self, environ: Mapping[str, str]) -> None:
        """See `refresh`."""
        refresh(environ)
        _outlive_destroyed_groups()

    def show_waits(self) -> None:
        """Puts Python around what is not and ranks call themselves: `work.wait()`, `store.get(key)`."""
        import torch.distributed

        if not torch.distributed.is_available():  # a build without it
            return
        from torch._C import _distributed_c10d as c10d

        for kind, names in ((c10d.Work, ("wait",)), (c10d.Store, ("wait", "get", "queue_pop", "barrier"))):
            for name in names:
                if hasattr(kind, name):  # the last two are younger than the oldest torch that we support
                    setattr(kind, name, _with_a_frame(getattr(kind, name)))

    def own_error(self, error_file: str) -> str:
        """Returns the message of torch.distributed.elastic's `@record`, or ""."""
        try:
            message = json.loads(Path(error_file).read_text())["message"]
            return str(message["message"] if isinstance(message, dict) else message)
        except (OSError, ValueError, KeyError, TypeError):
            return ""


def refresh(environ: Mapping[str, str]) -> None:
    """Sets the thread count, which the forkserver kept at 1, and seeds anew what ranks draw from.

    The forkserver's state would give all ranks of all its runs the same random numbers.
    """
    import torch

    threads = environ["OMP_NUM_THREADS"].partition(",")[0].strip()  # OpenMP takes one per level
    if threads.isdecimal() and int(threads):
        torch.set_num_threads(int(threads))
    torch.default_generator.seed()  # not torch.seed(): GPUs start from a fixed seed
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _with_a_frame(method: Any) -> Any:
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    # The name shows in stacks. And by it and by `self` pybind11 sees that such a call of a subclass's is no
    # overridden method, to be called from C++ instead of itself.
    call.__code__ = call.__code__.replace(co_name=method.__name__)
    return wraps(method)(call)


def _outlive_destroyed_groups() -> None:
    """Keeps the last destroyed process group referenced until the rank ends.

    Else a DDP model that outlives `destroy_process_group`, as one local to a function does, is the
    last to hold its group. Its reducer then ends gloo's thread while it holds the interpreter's
    lock, for which that thread may wait: the rank hangs for ever (torch 2.13). Ranks that torchrun
    starts are as torchrun makes them.
    """
    import torch.distributed
    from torch.distributed import distributed_c10d

    destroy = distributed_c10d.destroy_process_group
    held: list[object] = []

    @wraps(destroy)
    def destroy_process_group(group: Any = None) -> None:
        if distributed_c10d.is_initialized():
            held[:] = [group or distributed_c10d.group.WORLD]
        destroy(group)

    distributed_c10d.destroy_process_group = destroy_process_group
    torch.distributed.destroy_process_group = destroy_process_group
