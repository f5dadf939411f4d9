"""Reservations: of nodes that are there, for someone."""

from __future__ import annotations

from dalsegno.hardware import did_you_mean
from dalsegno.spec.checks.partitions import nodes_known
from dalsegno.spec.checks.report import Report
from dalsegno.spec.layout import members
from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.slurm import Reservation


def check_reservations(spec: ClusterSpec, report: Report) -> None:
    """Nodes, partition, and who it is for."""
    for reservation in spec.reservations:
        _nodes_or_count(reservation, report)
        _for_whom(reservation, report)
        _partition(reservation, spec, report)
    if spec.reservations and nodes_known(spec, report):
        held = {name: dict.fromkeys(nodes) for name, nodes in members(spec).items()}
        everything = {node: None for nodes in held.values() for node in nodes}
        for reservation in spec.reservations:
            _nodes(reservation, held.get(reservation.partition, everything), report)


def _nodes_or_count(reservation: Reservation, report: Report) -> None:
    if bool(reservation.nodes) == bool(reservation.node_count):
        what = f"reservation `{reservation.name}` must have either `nodes` or `node_count`"
        report.add(reservation, "name", what, "name the nodes, or say how many", reads=("nodes", "node_count"))


def _for_whom(reservation: Reservation, report: Report) -> None:
    if not reservation.users and not reservation.accounts:
        what = f"reservation `{reservation.name}` is for nobody"
        report.add(reservation, "name", what, "add `users: [root]` or `accounts:`", reads=("users", "accounts"))


def _partition(reservation: Reservation, spec: ClusterSpec, report: Report) -> None:
    names = [partition.name for partition in spec.partitions]
    if (
        reservation.partition
        and reservation.partition not in names
        and report.unnamed(reservation.partition, "partitions")
    ):
        what = f"reservation `{reservation.name}` is in `{reservation.partition}`, which is no partition"
        report.add(reservation, "partition", what, did_you_mean(reservation.partition, names))


def _nodes(reservation: Reservation, there: dict[str, None], report: Report) -> None:
    strange = next((name for name in reservation.nodes if name not in there), None)
    if strange:
        where = f"not in `{reservation.partition}`" if reservation.partition else "not there"
        what = f"reservation `{reservation.name}` is of the node `{strange}`, which is {where}"
        report.add(reservation, "nodes", what, did_you_mean(strange, there), reads=("partition",))
    if reservation.node_count and reservation.node_count > len(there):
        what = f"reservation `{reservation.name}` is of {reservation.node_count} nodes, but there are {len(there)}"
        report.add(reservation, "node_count", what, f"write at most {len(there)}", reads=("partition",))
