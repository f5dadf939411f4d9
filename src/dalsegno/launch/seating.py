"""The message that starts a node's workers: their ranks, their variables, and who else is in the run."""

from __future__ import annotations

from collections.abc import Mapping

from dalsegno.launch.events import Start
from dalsegno.launch.peers import Peer
from dalsegno.launch.site import Seats, Terms
from dalsegno.train.contract import GENERATION, RUN, WANTED_NODES
from dalsegno.train.frames import Message


def start_message(
    site: Terms, order: Start, peers: Mapping[str, Peer], in_memory: Message | None = None
) -> Message | None:
    """None while one of the group is just being lost: what follows from that comes at once."""
    group = order.group
    if any(agent not in peers for agent in group.agents):
        return None
    hosts = tuple(peers[agent].host for agent in group.agents)
    seats = Seats(group.generation, hosts, group.nproc_per_node, order.store_port, order.restarts)
    first = next(place.first_rank for place in group.places if place.agent == order.agent)
    found = peers[order.agent].hello.found
    own = {RUN: site.folder.run, GENERATION: str(group.generation), WANTED_NODES: str(site.shape.max_nodes)}
    workers = [
        {"rank": rank, "env": {**site.worker_env(seats, rank, found), **own}}
        for rank in range(first, first + group.nproc_per_node)
    ]
    others = [list(peer.probe) for name, peer in peers.items() if name != order.agent]
    return {"start": {"generation": group.generation, "workers": workers, "peers": others, **(in_memory or {})}}
