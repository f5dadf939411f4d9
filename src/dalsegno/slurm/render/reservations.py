"""scontrol's words for the cluster's reservations."""

from __future__ import annotations

from dalsegno.hostlist import compress
from dalsegno.slurm.render.lines import number
from dalsegno.spec.facts import Cluster, Reservation


def reservation_commands(cluster: Cluster) -> list[list[str]]:
    """Each reservation as the words after `scontrol`: `create reservation ReservationName=…`."""
    return [["create", "reservation", *_words(reservation)] for reservation in cluster.reservations]


def _words(reservation: Reservation) -> list[str]:
    settings = {
        "ReservationName": reservation.name,
        "StartTime": reservation.start,
        "Duration": number(reservation.duration_min) or "UNLIMITED",
        "Nodes": compress(reservation.nodes),
        "NodeCnt": number(reservation.node_count) if not reservation.nodes else "",
        "PartitionName": reservation.partition,
        **_who(reservation),
        "Flags": ",".join(reservation.flags),
    }
    return [f"{key}={value}" for key, value in settings.items() if value]


def _who(reservation: Reservation) -> dict[str, str]:
    """Slurm refuses a reservation that is for nobody; one without names is the administrator's own."""
    users = reservation.users if reservation.users or reservation.accounts else ("root",)
    return {"Users": ",".join(users), "Accounts": ",".join(reservation.accounts)}
