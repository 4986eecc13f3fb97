"""Horovod over gloo, with NCCL for the tensors of GPUs where it was built with that.

Source of the contract: the variables that `horovodrun --gloo` gives its ranks, and Horovod's
`GlooContext`, which reads them.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping

from sparkdist.frameworks import horovod_elastic
from sparkdist.frameworks.base import Framework, Place
from sparkdist.frameworks.torch import Torch, refresh

_COMPUTED = frozenset(
    f"HOROVOD_{name}"
    for name in (
        "RANK",
        "SIZE",
        "LOCAL_RANK",
        "LOCAL_SIZE",
        "CROSS_RANK",
        "CROSS_SIZE",
        "HOSTNAME",
        "GLOO_RENDEZVOUS_ADDR",
        "GLOO_RENDEZVOUS_PORT",
        "ELASTIC",
        "SECRET_KEY",
    )
)


class Horovod(Framework):
    """Real Horovod, as `horovodrun` would start it."""

    name = "horovod"
    distribution = "horovod"
    preload = ("http.server", "sparkdist.frameworks.horovod_load")
    preload_idle = ("torch._dynamo",)  # the first step of an optimizer imports it
    start_env = Torch.start_env
    reserved_env = Framework.reserved_env | _COMPUTED
    waits = r"/horovod/(?:torch/mpi_ops|common/basics)\.py (?:synchronize|barrier|join|init)$"
    has_store = True

    def serve(self, listener: socket.socket) -> None:
        """Serves Horovod's rendezvous on `listener`: what ranks tell each other of their addresses."""
        from sparkdist.frameworks.horovod_store import Store

        Store(listener).serve_forever()

    def rank_env(self, place: Place) -> dict[str, str]:
        """Returns horovodrun's variables for a rank, and those of any rank."""
        # Ranks of one number within their nodes are a group too, of the nodes that have such a rank.
        crossing = [node for node, size in enumerate(place.local_sizes) if size > place.local_rank]
        env = {
            **super().rank_env(place),
            "HOROVOD_RANK": str(place.rank),
            "HOROVOD_SIZE": str(place.world_size),
            "HOROVOD_LOCAL_RANK": str(place.local_rank),
            "HOROVOD_LOCAL_SIZE": str(place.local_world_size),
            "HOROVOD_CROSS_RANK": str(crossing.index(place.node)),
            "HOROVOD_CROSS_SIZE": str(len(crossing)),
            # Names the group of a node's ranks. Two executors may share a host.
            "HOROVOD_HOSTNAME": f"node-{place.node}",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": place.master_addr,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(place.master_port),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "OMP_NUM_THREADS": str(place.threads),
        }
        if place.interface:
            env |= {"HOROVOD_GLOO_IFACE": place.interface, "NCCL_SOCKET_IFNAME": place.interface}
        return env

    def after_fork(self, environ: Mapping[str, str]) -> None:
        """Puts torch right where Horovod runs on it, see `torch.refresh`; has commits outlive an attempt."""
        horovod_elastic.install()
        if "torch" in sys.modules:
            refresh(environ)
