"""Measure pairs and groups of nodes in one job, with one process per node or GPU. Imports torch.

`bench-pairs '{"size": 67108864, …}'` runs one rank. Rank 0 decides what is measured next and prints JSON lines: first
the nodes, then a line for each measured group, and last the result of a bisection.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from dalsegno.bench.collectives.collective_measure import choose_device, gather_json
from dalsegno.bench.collectives.pairs import LOW, Group, GroupResult, judge_pairs, next_groups, rounds
from dalsegno.bench.ladder.ladder import world_env
from dalsegno.bench.nccl.table import NcclTest

_TIMEOUT = timedelta(minutes=10)
_PROBE_BYTES = 1 << 16
_MAX_CALLS = 200
_MAX_AGAIN = 16
_AGAIN = 2  # number of further measurements before a bisection calls a group slow
# If a call of full size would take more than this many times `seconds`, calls of _PROBE_BYTES are timed instead.
_PATIENCE = 4.0
_GROUP_LOW = 0.85  # without a fault, a group of more than two nodes may be slower than a pair by this factor
_LEAST_CALLS = 3  # minimum number of calls of an exchange; the first may wait for a partner that is not ready


@dataclass(frozen=True)
class PairsAsk:
    """The settings: message size, time per group, and whether to bisect instead of measuring every pair."""

    size: int = 64 << 20  # message size in bytes
    seconds: float = 1.0
    bisect: bool = False
    low: float = LOW
    device: str = "auto"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PairsAsk:
        return cls(**json.loads(text))


class PairsRank:
    """One rank of the measurement. Orders and results are sent over gloo; only the measured groups use NCCL."""

    def __init__(self, ask: PairsAsk) -> None:
        self.ask = ask
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.device = choose_device(ask.device, int(os.environ.get("LOCAL_RANK", 0)), local_size)
        self.backend = "nccl" if self.device.type == "cuda" else "gloo"
        if self.backend == "nccl":
            torch.cuda.set_device(self.device)
        dist.init_process_group("gloo", rank=self.rank, world_size=self.size, timeout=_TIMEOUT)
        self.hosts: list[str] = self._gather(socket.gethostname().partition(".")[0])
        self.nodes = list(dict.fromkeys(self.hosts))

    def measure(self, groups: Sequence[Group]) -> dict[Group, float]:
        """Measure groups that have no node in common, at the same time. All ranks must call this."""
        # All ranks create all groups, so that each group gets its own name. With `use_local_synchronization`, a second
        # group of the same ranks would get the name of the first, and read its old addresses from the store.
        ranks = {group: [rank for rank, host in enumerate(self.hosts) if host in group] for group in groups}
        made = {group: dist.new_group(ranks[group], timeout=_TIMEOUT, backend=self.backend) for group in groups}
        dist.barrier()
        own = next((group for group in groups if self.hosts[self.rank] in group), None)
        value = 0.0
        if own:
            value = self._exchanges(made[own], own) if self.ask.bisect else self._bus_bandwidth(made[own], ranks[own])
        found = self._gather(value)
        return {
            group: min(value for host, value in zip(self.hosts, found, strict=True) if host in group)
            for group in groups
        }

    def _exchanges(self, members: Any, nodes: Group) -> float:
        """Return the bandwidth between the slowest pair of these nodes in GB/s, in each direction.

        A collective of the whole group does not suffice: a ring or a tree uses only some links, and its time hides a
        slow link among the others. Here every pair exchanges data, in rounds with one partner per node.
        """
        try:
            own = self.hosts[self.rank]
            ranks_of = {node: [rank for rank, host in enumerate(self.hosts) if host == node] for node in nodes}
            partners = [
                ranks_of[one if other == own else other]
                for each in rounds(nodes) for one, other in each if own in (one, other)
            ]  # fmt: skip
            at = ranks_of[own].index(self.rank)
            peers = [ranks[at] for ranks in partners if at < len(ranks)]
            size, calls = _PROBE_BYTES, _LEAST_CALLS
            took_s = self._slowest(self._sweep(peers, size, calls, members), members)
            if took_s * self.ask.size / size < _PATIENCE * self.ask.seconds:
                size = self.ask.size
                took_s = self._slowest(self._sweep(peers, size, 1, members), members)
                calls = min(_MAX_CALLS, max(_LEAST_CALLS, int(self.ask.seconds / took_s / len(nodes))))
            slowest_s = self._slowest(self._sweep(peers, size, calls, members), members)
            return len(ranks_of[own]) * size / 1e9 / slowest_s
        finally:
            dist.destroy_process_group(members)

    def _sweep(self, peers: Sequence[int], size: int, calls: int, members: Any) -> float:
        """Exchange data with each peer in turn, and return the time of the slowest peer. Of each peer, the fastest call
        counts."""
        sent, received = (torch.zeros(max(1, size // 4), device=self.device) for _ in range(2))
        times = [min(self._exchange(sent, received, peer, members) for _ in range(calls)) for peer in peers]
        return max(times, default=0.0)

    def _exchange(self, sent: Any, received: Any, peer: int, members: Any) -> float:
        begin = time.perf_counter()
        both = [dist.P2POp(dist.isend, sent, peer, members), dist.P2POp(dist.irecv, received, peer, members)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        if self.backend == "nccl":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    def _bus_bandwidth(self, members: Any, ranks: Sequence[int]) -> float:
        """Return the bus bandwidth of an all-reduce in GB/s. The fastest call counts, because other programs can only
        make calls slower."""
        try:
            tensor = torch.zeros(_PROBE_BYTES // 4, device=self.device)
            self._call(tensor, members)  # not timed, because the first call opens the connections
            took_s = self._slowest(self._call(tensor, members), members)
            if took_s * self.ask.size / _PROBE_BYTES < _PATIENCE * self.ask.seconds:
                tensor = torch.zeros(self.ask.size // 4, device=self.device)
                took_s = self._slowest(self._call(tensor, members), members)
            calls = min(_MAX_CALLS, max(2, int(self.ask.seconds / took_s)))
            best_s = min(self._call(tensor, members) for _ in range(calls))
            return float(tensor.numel() * 4 / 1e9 / best_s) * NcclTest.ALL_REDUCE.bus_factor(len(ranks))
        finally:
            dist.destroy_process_group(members)

    def _call(self, tensor: Any, members: Any) -> float:
        """Return the time of one all-reduce in seconds."""
        begin = time.perf_counter()
        dist.all_reduce(tensor, group=members)
        if self.backend == "nccl":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    def _slowest(self, took_s: float, members: Any) -> float:
        """Return the longest time of the group's ranks, so that all ranks make the same decision."""
        found = torch.tensor([took_s], device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=members)
        return float(found.item())

    def share(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups that rank 0 has decided to measure next."""
        return [tuple(group) for group in self._gather(groups)[0]]

    def _gather(self, value: Any) -> list[Any]:
        return gather_json(value, self.size, "cpu")

    def leave(self) -> None:
        dist.destroy_process_group()


def measure_all(rank: PairsRank, ask: PairsAsk) -> Iterator[tuple[Group, float]]:
    """Yield each pair's bandwidth. At most _MAX_AGAIN slow pairs are measured a second time, each alone; the better
    result counts."""
    found: dict[Group, float] = {}
    for each in rounds(rank.nodes):
        for pair, value in rank.measure(each).items():
            found[pair] = value
            yield pair, value
    limit = judge_pairs({(one, other): value for (one, other), value in found.items()}, ask.low).limit
    slow = sorted((pair for pair in found if found[pair] < limit), key=lambda pair: -found[pair])
    for pair in slow[:_MAX_AGAIN]:  # measure again the slow pairs nearest to the limit
        again = rank.measure([pair])[pair]
        yield pair, max(again, found[pair])


def bisect(rank: PairsRank, ask: PairsAsk) -> Iterator[tuple[Group, float] | dict[str, Any]]:
    """Yield the bandwidth of each measured group, then the faults. The first round gives the usual bandwidth."""
    first = rank.measure(rounds(rank.nodes)[0])
    yield from first.items()
    usual = median(sorted(first.values())[len(first) // 2 :])
    results = list[GroupResult]()

    def judged(group: Group, value: float) -> tuple[Group, float]:
        """Record a result. A slow group is first measured again by itself: one disturbance is not a fault."""
        limit = (ask.low if len(group) == 2 else ask.low * _GROUP_LOW) * usual
        for _ in range(_AGAIN):
            if value < limit:
                value = max(value, rank.measure([group])[group])
        results.append(GroupResult(group, value < limit))
        return group, value

    for pair, value in first.items():
        judged(pair, value)
    while True:
        step = next_groups(rank.nodes, results)
        groups = rank.share(step.groups)
        if not groups:
            break
        for group, value in rank.measure(groups).items():
            yield judged(group, value)
    yield {"usual": usual, "faults": [list(each) for each in step.faults], "unsure": list(step.unsure)}


def main(arguments: Sequence[str]) -> int:
    """Measure as the rank that the environment variables give. Rank 0 prints the results."""
    from dalsegno.hostlist import expand

    os.environ.update(world_env(os.environ, first_host=lambda hosts: expand(hosts)[0]) or {})
    ask = PairsAsk.from_json(arguments[0])
    rank = PairsRank(ask)

    def write(value: object) -> None:
        if rank.rank == 0:
            sys.stdout.write(json.dumps(value) + "\n")
            sys.stdout.flush()

    write({"nodes": rank.nodes, "backend": rank.backend})
    if len(rank.nodes) < 2:
        sys.stderr.write("all processes run on one node\n")
        return 2
    for each in bisect(rank, ask) if ask.bisect else measure_all(rank, ask):
        write(each if isinstance(each, dict) else {"group": list(each[0]), "gbytes_per_s": each[1]})
    rank.leave()
    return 0
