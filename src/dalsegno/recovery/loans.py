"""Reservations of Slurm that keep a lent spare for the user it is lent to.

Without one, a lent spare is an ordinary node: any waiting job may have it, before the job it is lent to starts or
after that job ends. The reservation is there before the node is in service. When the job runs, it is closed to further
jobs of the same user, and it goes when the node is a spare again. Slurm itself removes one that no job has used for
some minutes, should the controller be gone.
"""

from __future__ import annotations

import contextlib

from dalsegno.errors import CommandFailed
from dalsegno.recovery.hands import Slurm

# FLEX: a job may run for longer than the reservation lasts. IGNORE_JOBS: what still ends on the node does not matter.
_FLAGS = "FLEX,IGNORE_JOBS,PURGE_COMP=00:05:00"


def loan_name(node: str) -> str:
    """Return the name of the reservation for a node."""
    return f"dalsegno-lent-{node}"


def reserve(slurm: Slurm, node: str, uid: int) -> bool:
    """Keep a node for a user, also where a controller before us had begun to; False if Slurm refuses."""
    name = loan_name(node)
    with contextlib.suppress(CommandFailed):
        slurm.update(ReservationName=name, Users=str(uid))
        return True
    with contextlib.suppress(CommandFailed):
        words = {"ReservationName": name, "Users": uid, "Nodes": node, "StartTime": "now", "Duration": "UNLIMITED"}
        slurm.scontrol("create", "reservation", *(f"{key}={value}" for key, value in words.items()), f"Flags={_FLAGS}")
        return True
    return False


def close_loan(slurm: Slurm, node: str) -> None:
    """Let no further job start on a lent node; none of the reservation's own runs or waits is touched."""
    with contextlib.suppress(CommandFailed):  # Slurm had refused it, or has removed it
        slurm.update(ReservationName=loan_name(node), Users="root")


def end_loan(slurm: Slurm, node: str) -> None:
    """Remove the reservation; gone already is fine."""
    with contextlib.suppress(CommandFailed):
        slurm.scontrol("delete", f"ReservationName={loan_name(node)}")
