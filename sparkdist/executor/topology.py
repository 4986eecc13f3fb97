"""Which ranks run where.

Tasks are grouped by executor: Spark gives each task the `host:port` of its executor, and equal
addresses mean one container and one view of the GPUs. Ranks are numbered executor by executor,
task 0's first, so LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK mean what they mean under torchrun;
Spark's own order interleaves hosts.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Node:
    """One executor of the gang, or the driver.

    Attributes:
        index: Its place in the gang.
        tasks: Its Spark partitions, ascending; the first one leads.
        sizes: The numbers of ranks of all the gang's nodes, by index.
        peer: A host of the gang other than its own, or "" where all share one.
    """

    index: int
    tasks: tuple[int, ...]
    sizes: tuple[int, ...]
    peer: str = ""

    @property
    def count(self) -> int:
        """Nodes in the gang."""
        return len(self.sizes)

    @property
    def size(self) -> int:
        """Its number of ranks."""
        return self.sizes[self.index]

    @property
    def first_rank(self) -> int:
        """The rank of its local rank 0."""
        return sum(self.sizes[: self.index])

    @property
    def leader(self) -> int:
        """The partition that starts this node's agent."""
        return self.tasks[0]


def nodes(addresses: Sequence[str], world_size: int, processes_per_task: int) -> list[Node]:
    """Groups tasks by executor and numbers their ranks.

    Args:
        addresses: Each task's executor as `host:port`, by partition.
        world_size: Ranks in the gang; the last task in rank order may hold fewer than the others.
        processes_per_task: Ranks in each other task.
    """
    groups: dict[str, list[int]] = {}
    for partition, address in enumerate(addresses):
        groups.setdefault(address, []).append(partition)
    hosts = [host_of(address) for address in groups]
    sizes: list[int] = []
    for tasks in groups.values():
        sizes.append(min(len(tasks) * processes_per_task, world_size - sum(sizes)))
    return [
        Node(index, tuple(tasks), tuple(sizes), next((host for host in hosts if host != hosts[index]), ""))
        for index, tasks in enumerate(groups.values())
    ]


def visible_devices(addresses: Sequence[str], preset: str | None) -> str:
    """Returns CUDA_VISIBLE_DEVICES for a node whose tasks were given these GPUs.

    Args:
        addresses: Spark's addresses of the GPUs in LOCAL_RANK order: indices, UUIDs or MIG names.
        preset: The executor's own CUDA_VISIBLE_DEVICES, into which indices point, or None.

    Raises:
        ValueError: An index points beyond it, or two ranks would share a GPU.
    """
    chosen = [entry.strip() for entry in (preset or "").split(",") if entry.strip()]
    devices = []
    for address in addresses:
        if preset is None or not address.isdecimal():
            devices.append(address)
        elif int(address) < len(chosen):
            devices.append(chosen[int(address)])
        else:
            raise ValueError(
                f"Spark gave a task the GPU {address}, and CUDA_VISIBLE_DEVICES={preset} of the executor has "
                f"{len(chosen)}; make its discovery script list only those, or leave the variable unset"
            )
    if len(set(devices)) < len(devices):
        raise ValueError(f"two ranks would share a GPU: the node was given {', '.join(devices)}")
    return ",".join(devices)


def host_of(address: str) -> str:
    """Returns the host of `host:port`, split from the right since IPv6 hosts hold colons."""
    return address.rpartition(":")[0].strip("[]")


def address_towards(peer: str) -> str:
    """Returns the address of this host that a packet to `peer` would leave from.

    Loopback where the whole gang is on one host (`peer` is ""). Nothing is sent.
    """
    if not peer:
        return "127.0.0.1"
    family, kind, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Returns the name of the network interface that owns an address of this host, or ""."""
    if ipaddress.ip_address(address).version == 6:
        wanted = ipaddress.ip_address(address).exploded.replace(":", "")
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            if line.split()[0] == wanted:
                return line.split()[-1]
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
