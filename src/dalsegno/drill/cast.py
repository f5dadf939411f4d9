"""How many nodes of a cluster train in a drill, and how many stand by. Pure."""

from __future__ import annotations

from dalsegno.errors import UsageError

NODES, SPARES = 4, 1  # where nobody says otherwise, and there are so many


def cast(in_service: int, nodes: int | None, spares: int | None) -> tuple[int, int]:
    """As many as were asked for, else as there are; more than there are would wait in Slurm's queue for ever."""
    if nodes is None:
        nodes = max(1, min(NODES, in_service - (spares or 0)))
    if spares is None:
        spares = min(SPARES, max(0, in_service - nodes))
    if nodes + spares > in_service:
        by = f" and {spares} more that stand by" if spares else ""
        raise UsageError(
            f"{nodes} nodes{by} are asked for, and {in_service} of the default partition are in service",
            hint="`--nodes N --spares M` asks for fewer; `dalsegno nodes` shows why others are out",
        )
    return nodes, spares
