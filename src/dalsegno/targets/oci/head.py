"""The controller's side of a cluster on OCI, and the stack's own commands that reboot and replace machines there.

Release 3 has the program `mgmt`, release 2.10 the script resize.sh. A machine in a cluster network gets a name from its
address, so a new machine may have another name than the one that it replaces. Recovery therefore reboots nodes and
never replaces them: a person does, with `dalsegno nodes replace`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dalsegno.errors import NotThere, TargetError
from dalsegno.targets.base import NodeTimes
from dalsegno.targets.folder import read_applied
from dalsegno.targets.oci.variables import settings_of
from dalsegno.targets.sides import HeadSide

TIMES = NodeTimes(boot_s=3600.0, gone_s=60.0)
RESIZE = "/opt/oci-hpc/bin/resize.sh"
_ENDING = ("terminating", "terminated")


def reboot_command(release: str, node: str) -> list[str]:
    """Return the command on the head node that reboots a node. `mgmt` resets the machine, even if it hangs."""
    if release == "v3":
        return ["mgmt", "nodes", "reboot", "--nodes", node]
    return ["scontrol", "reboot", "ASAP", "nextstate=RESUME", "reason=dalsegno:reboot", node]


def describe_command(node: str) -> list[str]:
    """Return the command that describes a node of release 3 as JSON."""
    return ["mgmt", "nodes", "get", "names", node, "--format", "json"]


def replace_commands(release: str, node: str, stack_cluster: str) -> list[list[str]]:
    """Return the commands on the head node that terminate a machine and start another one in its cluster.

    With release 3, the tag tells Oracle that the machine is broken, so that it is not handed out again.
    """
    if release == "v3":
        return [
            ["mgmt", "nodes", "tag-and-terminate", "--nodes", node],
            ["mgmt", "clusters", "add", "node", "--count", "1", "--cluster", stack_cluster],
        ]
    chosen = ["--cluster_name", stack_cluster] if stack_cluster else []
    return [[RESIZE, "remove", "--nodes", node, *chosen, "--quiet"], [RESIZE, "add", "1", *chosen, "--quiet"]]


def read_machine(answer: str, node: str) -> Mapping[str, Any]:
    """Return the description of a node from the answer of `mgmt`, which may begin with messages."""
    start = answer.find("[")
    try:
        found = json.loads(answer[start:]) if start >= 0 else []
        machine = next((each for each in found if isinstance(each, dict)), None)
    except (ValueError, TypeError):
        machine = None
    if machine is None:
        raise NotThere(f"the stack has no node `{node}`", hint="`mgmt nodes list` on the controller lists them")
    return machine


def cluster_to_grow(machine: Mapping[str, Any], node: str) -> str:
    """Return the cluster that gets the new machine. Raise if the machine ends already."""
    if str(machine.get("status")) in _ENDING:
        raise TargetError(f"{node} is being replaced already", hint="`mgmt nodes list` on the controller shows it")
    name = str(machine.get("cluster_name") or "")
    if not name:
        raise TargetError(f"the stack does not know the cluster of {node}", hint="`mgmt clusters list` shows clusters")
    return name


class OciHead(HeadSide):
    """The cluster in the state folder of the controller."""

    kind = "oci"
    times = TIMES

    def reboot(self, node: str) -> None:
        applied = read_applied(self.folder)
        release = settings_of(applied).stack_version if applied else "v3"
        self.runner.run(reboot_command(release, node), timeout_s=120).checked("run it as root on the controller")
