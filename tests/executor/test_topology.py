"""Which ranks run where, and over which address and interface their gang meets."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sparkdist.executor import topology
from sparkdist.executor.topology import Node


def shape(addresses, world_size, per_task=1):
    """Each node's tasks and ranks."""
    found = topology.nodes(addresses, world_size, per_task)
    assert [node.index for node in found] == list(range(len(found)))
    assert {node.count for node in found} == {len(found)}
    assert all(node.leader == min(node.tasks) for node in found)
    return [(node.tasks, list(range(node.first_rank, node.first_rank + node.size))) for node in found]


def test_one_executor_holds_the_whole_gang():
    assert topology.nodes(["h:1"] * 3, 3, 1) == [Node(0, (0, 1, 2), (3,))]


def test_interleaved_executors_are_numbered_one_by_one_and_task_0s_first():
    addresses = ["b:1", "a:1", "b:1", "a:2", "a:1", "b:1"]
    assert shape(addresses, 6) == [((0, 2, 5), [0, 1, 2]), ((1, 4), [3, 4]), ((3,), [5])]


def test_tasks_of_several_ranks():
    assert shape(["a:1", "b:1", "a:1"], 12, 4) == [((0, 2), list(range(8))), ((1,), [8, 9, 10, 11])]


@pytest.mark.parametrize("world_size", [9, 10, 11, 12])
def test_the_last_task_in_rank_order_may_hold_fewer(world_size):
    expected = [((0, 2), list(range(8))), ((1,), list(range(8, world_size)))]
    assert shape(["a:1", "b:1", "a:1"], world_size, 4) == expected


def test_every_rank_has_one_node():
    for tasks in range(1, 12):
        addresses = [f"h{7 * n % 3}:{n % 2}" for n in range(tasks)]
        for per_task in (1, 2, 8):
            for world_size in range((tasks - 1) * per_task + 1, tasks * per_task + 1):
                found = shape(addresses, world_size, per_task)
                assert [rank for _, ranks in found for rank in ranks] == list(range(world_size))
                assert sorted(task for parts, _ in found for task in parts) == list(range(tasks))
                assert all(ranks for _, ranks in found)


def test_a_peer_is_on_another_host():
    peers = [node.peer for node in topology.nodes(["a:1", "a:2", "b:1"], 3, 1)]
    assert peers == ["b", "b", "a"]
    assert [node.peer for node in topology.nodes(["a:1", "a:2"], 2, 1)] == ["", ""]


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("host.example:7077", "host.example"),
        ("10.0.0.1:7077", "10.0.0.1"),
        ("[fd00::1]:7077", "fd00::1"),
        ("fd00::1:7077", "fd00::1"),
        ("[::1]:7077", "::1"),
    ],
)
def test_a_host_is_split_off_from_the_right(address, host):
    assert topology.host_of(address) == host


def test_ipv6_executors_are_grouped_and_have_peers():
    found = topology.nodes(["[fd00::1]:7", "[fd00::2]:7", "[fd00::1]:7"], 3, 1)
    assert [(node.tasks, node.peer) for node in found] == [((0, 2), "fd00::2"), ((1,), "fd00::1")]


def test_a_gang_on_one_host_meets_on_loopback():
    assert topology.address_towards("") == "127.0.0.1"
    for peer in ("127.0.0.1", "localhost", "127.8.8.8"):
        assert topology.interface_of(topology.address_towards(peer)) == "lo"


def test_the_address_is_the_one_that_packets_leave_from():
    # The documentation's network: it is routed like the rest of the world, and nothing is sent.
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
    except OSError:
        with pytest.raises(OSError):
            topology.address_towards("192.0.2.1")
        return
    address = topology.address_towards("192.0.2.1")
    assert address != "0.0.0.0"
    name = topology.interface_of(address)
    assert name in {name for _, name in socket.if_nameindex()} and name != "lo"


def test_every_interface_is_found_by_its_ipv6_address():
    path = Path("/proc/net/if_inet6")
    lines = path.read_text().splitlines() if path.exists() else []
    for digits, *_, name in (line.split() for line in lines):
        address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
        assert topology.interface_of(address) == name


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1"])
def test_an_address_of_another_host_has_no_interface_here(address):
    assert topology.interface_of(address) == ""
