"""The target on the head node of ParallelCluster, which the controller, the observer and people there use.

clustermgtd, ParallelCluster's daemon, owns the nodes. Once a minute, it replaces nodes that are down, or drained and
idle. So draining a node replaces its machine. Dal Segno only gives orders to Slurm and never calls AWS to replace or
reboot a machine. It never changes a reason that clustermgtd wrote. It creates no MAINT reservation, because in some
releases clustermgtd replaces the nodes of such a reservation again and again.
"""

from __future__ import annotations

from dataclasses import dataclass

from dalsegno.targets.base import NodeTimes
from dalsegno.targets.cloud.monitoring import AwsHead
from dalsegno.targets.cloud.node_plans import SLURM_BIN

SLURMCTLD_PORT = 6820  # the first port of ParallelCluster's range for slurmctld
TIMES = NodeTimes(boot_s=1800.0, gone_s=60.0)  # clustermgtd's time limit for a replacement, and its interval
PREFIX = "dalsegno:"  # the start of all reasons that the controller writes
REASON = f"{PREFIX}replace:requested"


@dataclass(frozen=True)
class NodeCommand:
    """The arguments of `scontrol` that repair a node on ParallelCluster."""

    words: tuple[str, ...]


def is_dynamic(node: str) -> bool:
    """Return whether a node is started on demand. Dynamic nodes have `-dy-` in their names, static nodes `-st-`."""
    return "-dy-" in node


def replace_command(node: str, reason: str) -> NodeCommand:
    """Return the command that replaces a machine.

    A dynamic node is powered down at once, and started again for the next job. A static node is set to DOWN.
    clustermgtd then terminates its machine and starts another one under the same name.
    """
    state = "POWER_DOWN_FORCE" if is_dynamic(node) else "DOWN"
    return NodeCommand(("update", f"NodeName={node}", f"State={state}", f"Reason={reason}"))


def reboot_command(node: str, reason: str) -> NodeCommand:
    """Return the command that reboots a machine. clustermgtd ignores a node while Slurm reboots it."""
    return NodeCommand(("reboot", "ASAP", "nextstate=RESUME", f"reason={reason}", node))


def reason_to_keep(found: str) -> str | None:
    """Return the reason to set for a repair.

    Return None if clustermgtd or a person wrote the present reason `found`. They then repair the node.
    """
    if not found:
        return REASON
    return found if found.startswith(PREFIX) else None


class PclusterHead(AwsHead):
    """The target on the head node, for the cluster of the state folder there.

    It repairs nodes with `scontrol`: clustermgtd then replaces the machine, or Slurm reboots it.
    """

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
