"""Compute the highest bandwidth that a collective can reach on given machines, and the lowest that is expected. Pure.

N nodes with g GPUs each make n ranks. L is what a GPU sends over NVLink in one direction, B what a node sends over the
network. All figures are bus bandwidths in GB/s. docs/bench.md has the formulas and where the expectations come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

from dalsegno.bench.nccl.machines import BenchMachines
from dalsegno.bench.nccl.table import NcclTest

# A ring reaches this share of L. Azure expects 228 of 300 GB/s (A100). NVIDIA measured 370 of 450 (H100) and 695 of
# 900 (B300).
RING_SHARE = 0.76
# An all-reduce in the switch reaches this share of the limit: 431 of 700 GB/s (Azure, H200), 800 of 1400 (OCI, B300).
SWITCH_SHARE = {"NVLink 4": 0.61, "NVLink 5": 0.57}
# A ring between nodes reaches this share of B. NVIDIA expects 24 of 25 GB/s per card, and calls less than 0.85 a fault.
NETWORK_SHARE = 0.85
TREE_SHARE = 0.8  # trees reach this share of the limit between nodes: AWS measured 78.3 of 93.8 GB/s on 2 x p4de
ALLTOALL_SHARE = 0.7
PCIE_4, PCIE_5 = 31.5, 63.0  # GB/s of 16 lanes in one direction

_ONE_TO_ONE = (NcclTest.BROADCAST, NcclTest.REDUCE, NcclTest.SENDRECV)
_ALL = (NcclTest.ALL_GATHER, NcclTest.REDUCE_SCATTER)


class Bottleneck(str, Enum):
    """The part of the machines that limits a test."""

    NVLINK = "NVLink"
    NETWORK = "network"
    PCIE = "PCIe"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Bound:
    """A limit, what sets it, and how it is computed."""

    busbw: float
    by: Bottleneck
    formula: str


@dataclass(frozen=True)
class Expectation:
    """The least bus bandwidth that healthy machines reach, what limits it, and where the figure comes from."""

    busbw: float
    by: Bottleneck
    why: str
    earlier: bool = False  # whether the figure comes from earlier results of the same message size


@dataclass(frozen=True)
class VendorFloor:
    """The all-reduce bandwidth below which a vendor's own health check fails a machine."""

    instance: str
    gpu: str
    gpus: int
    nodes: int  # 1 for a test inside one node, 2 for a test between two nodes
    busbw: float
    owner: str
    source: str


@cache
def vendor_floors() -> tuple[VendorFloor, ...]:
    """Return the published floors. The table has no quotes and no commas inside a cell."""
    lines = (Path(__file__).parent / "nccl_floors.csv").read_text(encoding="utf-8").splitlines()[1:]
    return tuple(
        VendorFloor(name, gpu, int(count), int(nodes), float(busbw), owner, source)
        for name, gpu, count, nodes, busbw, owner, source in (line.split(",") for line in lines)
    )


def find_bound(test: NcclTest, machines: BenchMachines) -> Bound | None:
    """Return the lowest limit that no algorithm can exceed; None if too little is known about the machines."""
    between = _between(test, machines, machines.network_gbytes_per_s)
    bounds = [each for each in (_inside(test, machines), between) if each]
    if machines.nodes > 1 and machines.network_gbytes_per_s <= 0:
        return None
    return min(bounds, key=lambda bound: bound.busbw, default=None)


def _inside(test: NcclTest, machines: BenchMachines) -> Bound | None:
    """Return the limit of NVLink, or of PCIe, inside each machine."""
    link, g, n = machines.link_gbytes_per_s, machines.gpus_per_node, machines.ranks
    if g < 2 or machines.gpu is None:
        return None
    if link <= 0:
        slot = PCIE_5 if machines.gpu.name.startswith(("h", "b", "gb", "gh")) else PCIE_4
        return Bound(slot, Bottleneck.PCIE, f"PCIe {slot:g} GB/s per GPU and direction")
    if test is NcclTest.ALL_REDUCE:
        return _all_reduce_inside(machines)
    if machines.nodes == 1:
        return Bound(link, Bottleneck.NVLINK, f"NVLink {link:g} GB/s per GPU and direction")
    direct = machines.network_gbytes_per_s / g  # a GPU also receives data from the network card, in addition to NVLink
    total = link + direct
    return Bound(total, Bottleneck.NVLINK, f"NVLink {link:g} + network {direct:g} GB/s per GPU, {n} ranks")


def _all_reduce_inside(machines: BenchMachines) -> Bound:
    link, g, n = machines.link_gbytes_per_s, machines.gpus_per_node, machines.ranks
    factor = 2 * (n - 1) / n
    ring = link * g / (2 * (g - 1)) * factor
    switch = link * g / (g + 1) * factor
    if machines.in_switch and switch > ring:
        return Bound(
            switch, Bottleneck.NVLINK, f"NVLink with reduction in the switch: {link:g} x {g}/{g + 1} x {factor:g}"
        )
    return Bound(ring, Bottleneck.NVLINK, f"NVLink: {link:g} x {g}/(2 x {g - 1}) x {factor:g}")


def _between(test: NcclTest, machines: BenchMachines, network: float) -> Bound | None:
    """Return the limit of the network between the machines. Each machine sends `network` GB/s."""
    nodes, g, n = machines.nodes, machines.gpus_per_node, machines.ranks
    if nodes < 2 or network <= 0:
        return None
    if test is NcclTest.ALL_REDUCE or test in _ALL:
        busbw = network * (n - 1) / n * nodes / (nodes - 1)
        return Bound(busbw, Bottleneck.NETWORK, f"network: {network:g} x {n - 1}/{n} x {nodes}/{nodes - 1}")
    if test in (NcclTest.ALLTOALL, NcclTest.ALLTOALLV):
        busbw = network / g * (n - 1) / (n - g)
        return Bound(busbw, Bottleneck.NETWORK, f"network: {network:g}/{g} x {n - 1}/{n - g}")
    if test in (NcclTest.SCATTER, NcclTest.GATHER):
        busbw = network * (n - 1) / (n - g)
        return Bound(busbw, Bottleneck.NETWORK, f"network: {network:g} x {n - 1}/{n - g}")
    return Bound(network, Bottleneck.NETWORK, f"network: {network:g} GB/s") if test in _ONE_TO_ONE else None


def find_expectation(test: NcclTest, machines: BenchMachines, bound: Bound) -> Expectation | None:
    """Return the higher of two figures: the one that the limits imply, and the vendor's floor. Return None if there is
    neither."""
    implied = _implied(test, machines)
    asked = _asked(test, machines, bound, implied.by if implied else bound.by)
    found = [each for each in (implied, asked) if each]
    return max(found, key=lambda each: each.busbw, default=None)


def unreachable_floors(test: NcclTest, machines: BenchMachines, bound: Bound) -> tuple[VendorFloor, ...]:
    """Return the published floors that are above the limit of these machines."""
    return tuple(each for each in _floors(test, machines) if each.busbw > bound.busbw)


def _implied(test: NcclTest, machines: BenchMachines) -> Expectation | None:
    parts = [each for each in (_implied_inside(test, machines), _implied_between(test, machines)) if each]
    if machines.nodes > 1 and len(parts) < 2 and machines.gpus_per_node > 1:
        return None
    return min(parts, key=lambda each: each.busbw, default=None)


def _implied_inside(test: NcclTest, machines: BenchMachines) -> Expectation | None:
    link, g = machines.link_gbytes_per_s, machines.gpus_per_node
    if g < 2 or link <= 0 or test in (NcclTest.SCATTER, NcclTest.GATHER, NcclTest.HYPERCUBE, NcclTest.UNKNOWN):
        return None
    if test is NcclTest.ALL_REDUCE and machines.in_switch and machines.gpu:
        share, limit = SWITCH_SHARE[machines.gpu.link], link * 2 * (g - 1) / (g + 1)
        return Expectation(share * limit, Bottleneck.NVLINK, f"{share:g} of {limit:.0f} GB/s inside a node")
    return Expectation(RING_SHARE * link, Bottleneck.NVLINK, f"{RING_SHARE:g} of NVLink's {link:g} GB/s")


def _implied_between(test: NcclTest, machines: BenchMachines) -> Expectation | None:
    network, link = machines.used_network_gbytes_per_s, machines.link_gbytes_per_s
    limit = _between(test, machines, network)
    if limit is None or test in (NcclTest.SCATTER, NcclTest.GATHER, NcclTest.SENDRECV):
        return None
    trees = machines.in_switch or (machines.nodes == 2 and machines.gpus_per_node > 1 and 2 * network < link)
    if test is NcclTest.ALL_REDUCE and trees:
        # In a tree, a node sends each byte once. NCCL uses trees with NVLS, and between two nodes with a slow network.
        return _share_between(TREE_SHARE, limit)
    if test in (NcclTest.ALLTOALL, NcclTest.ALLTOALLV):
        return _share_between(ALLTOALL_SHARE, limit)
    ring = min(network, link) if link and machines.gpus_per_node > 1 else network
    return Expectation(NETWORK_SHARE * ring, limit.by, f"{NETWORK_SHARE:g} of the network's {ring:g} GB/s, as a ring")


def _share_between(share: float, limit: Bound) -> Expectation:
    return Expectation(share * limit.busbw, limit.by, f"{share:g} of {limit.busbw:.0f} GB/s between nodes")


def _floors(test: NcclTest, machines: BenchMachines) -> list[VendorFloor]:
    """Return the floors for this instance type, then those for types with the same GPUs and, between nodes, the same
    network."""
    if test is not NcclTest.ALL_REDUCE or machines.nodes > 2 or machines.gpu is None:
        return []
    alike = [
        each
        for each in vendor_floors()
        if (each.gpu, each.gpus, each.nodes) == (machines.gpu.name, machines.gpus_per_node, machines.nodes)
        and (machines.nodes == 1 or _same_network(each.instance, machines))
    ]
    own = [each for each in alike if machines.instance and each.instance == machines.instance.name]
    return own + [each for each in alike if each not in own]


def _same_network(instance: str, machines: BenchMachines) -> bool:
    from dalsegno.hardware import instances

    other = instances().get(instance)
    return other is not None and (other.network_gbps or 0) / 8 == machines.network_gbytes_per_s


def _asked(test: NcclTest, machines: BenchMachines, bound: Bound, by: Bottleneck) -> Expectation | None:
    floors = [each for each in _floors(test, machines) if each.busbw <= bound.busbw]
    own = [each for each in floors if machines.instance and each.instance == machines.instance.name]
    lowest = min(own or floors, key=lambda floor: floor.busbw, default=None)
    if lowest is None:
        return None
    return Expectation(lowest.busbw, by, f"{lowest.owner}'s health check of {lowest.instance}")
