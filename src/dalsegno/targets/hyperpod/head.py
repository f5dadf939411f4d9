"""The target on HyperPod's controller instance, which Dal Segno's controller, the observer and users there use.

HyperPod owns the machines. Its agent replaces or reboots a node whose reason in Slurm is exactly `Action:Replace` or
`Action:Reboot`. HyperPod's own recovery stays on, unless the cluster file sets `node_recovery: None`. HyperPod's option
`--auto-resume` is not used, because runs of Dal Segno restart without it.
"""

from __future__ import annotations

from dalsegno.targets.base import NodeTimes
from dalsegno.targets.cloud.monitoring import AwsHead
from dalsegno.targets.cloud.node_plans import SLURM_BIN
from dalsegno.targets.machines import InstanceAction

TIMES = NodeTimes(boot_s=3600.0, gone_s=60.0)  # HyperPod takes 20 to 30 minutes to replace an instance
REASONS = {
    InstanceAction.REPLACE: "Action:Replace",
    InstanceAction.REBOOT: "Action:Reboot",
}  # HyperPod's agent acts only if the complete reason equals one of these


def repair_words(action: InstanceAction, node: str) -> tuple[str, ...]:
    """Return the arguments of `scontrol` that make HyperPod replace or reboot a node."""
    return "update", f"NodeName={node}", "State=FAIL", f"Reason={REASONS[action]}"


class HyperPodHead(AwsHead):
    """The target on HyperPod's controller instance, for the cluster of the state folder there."""

    kind = "hyperpod"
    times = TIMES
    slurm_bin = SLURM_BIN
    returns_nodes = True

    def replace(self, node: str) -> None:
        self.slurm.scontrol(*repair_words(InstanceAction.REPLACE, node))

    def reboot(self, node: str) -> None:
        self.slurm.scontrol(*repair_words(InstanceAction.REBOOT, node))
