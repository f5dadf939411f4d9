"""The head node's side of a cluster on ParallelCluster: what the controller, the observer and people there use.

clustermgtd, ParallelCluster's daemon, owns the nodes: once a minute it replaces nodes that are down, or drained and
idle. So draining a node replaces its machine. Nodes are repaired through Slurm, never by changing their machines.
Reasons that clustermgtd wrote are never cleared. No MAINT reservation is made: in some releases clustermgtd replaces
the nodes in one again and again.
"""

from __future__ import annotations

from dataclasses import dataclass

from dalsegno.targets.base import NodeTimes
from dalsegno.targets.cloud.node_plans import SLURM_BIN
from dalsegno.targets.sides import HeadSide

SLURMCTLD_PORT = 6820  # the first port of ParallelCluster's range for slurmctld
TIMES = NodeTimes(boot_s=1800.0, gone_s=60.0)  # clustermgtd's limit for a replacement, and its interval
PREFIX = "dalsegno:"  # the start of all reasons that the controller writes
REASON = f"{PREFIX}replace:requested"


@dataclass(frozen=True)
class NodeCommand:
    """The arguments of `scontrol` for a repair on ParallelCluster."""

    words: tuple[str, ...]


def is_dynamic(node: str) -> bool:
    """Return whether a node is started on demand: `train-dy-train-1`; static nodes have `-st-`."""
    return "-dy-" in node


def replace_command(node: str, reason: str) -> NodeCommand:
    """Return the command that replaces a machine.

    A dynamic node is powered down at once and started again for the next job. A static node is set down: clustermgtd
    terminates its machine and starts another under the same name.
    """
    state = "POWER_DOWN_FORCE" if is_dynamic(node) else "DOWN"
    return NodeCommand(("update", f"NodeName={node}", f"State={state}", f"Reason={reason}"))


def reboot_command(node: str, reason: str) -> NodeCommand:
    """Return the command that reboots a machine. clustermgtd ignores a node while Slurm reboots it."""
    return NodeCommand(("reboot", "ASAP", "nextstate=RESUME", f"reason={reason}", node))


def reason_to_keep(found: str) -> str | None:
    """Return the reason to give Slurm; None if clustermgtd or a person wrote the current one and handles the node."""
    if not found:
        return REASON
    return found if found.startswith(PREFIX) else None


class PclusterHead(HeadSide):
    """The cluster in the state folder of its head node. Repairs are requests to Slurm, which clustermgtd acts on."""

    kind = "parallelcluster"
    times = TIMES
    slurmctld_port = SLURMCTLD_PORT
    slurm_bin = SLURM_BIN

    def replace(self, node: str) -> None:
        reason = reason_to_keep(self.slurm.node(node).reason)
        if reason is not None:
            self.slurm.scontrol(*replace_command(node, reason).words)

    def reboot(self, node: str) -> None:
        reason = reason_to_keep(self.slurm.node(node).reason)
        if reason is not None:
            self.slurm.scontrol(*reboot_command(node, reason).words)
