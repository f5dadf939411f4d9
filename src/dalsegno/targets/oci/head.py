"""The target on the controller of an OCI cluster, and the stack's commands that reboot and replace its machines.

Release 3 of the stack has the program `mgmt`, and release 2.10 has the script resize.sh. In a cluster network, the name
of a machine is derived from its address. So a new machine may have another name than the one that it replaces. Recovery
therefore only reboots nodes. A person replaces them, with `dalsegno nodes replace`.
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
    """Return the command, to run on the head node, that reboots a node. `mgmt` resets the machine even if it hangs."""
    if release == "v3":
        return ["mgmt", "nodes", "reboot", "--nodes", node]
    return ["scontrol", "reboot", "ASAP", "nextstate=RESUME", "reason=dalsegno:reboot", node]


def describe_command(node: str) -> list[str]:
    """Return the command that describes a node of release 3 as JSON."""
    return ["mgmt", "nodes", "get", "names", node, "--format", "json"]


def replace_commands(release: str, node: str, stack_cluster: str) -> list[list[str]]:
    """Return the commands, to run on the head node, that terminate a machine and start another one in its cluster.

    In release 3, a tag tells Oracle that the machine is broken, so that nobody else gets it.
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
    """Return the name of the cluster that the new machine joins. Raise an error if the old machine is already being
    terminated."""
    if str(machine.get("status")) in _ENDING:
        raise TargetError(f"{node} is being replaced already", hint="`mgmt nodes list` on the controller shows it")
    name = str(machine.get("cluster_name") or "")
    if not name:
        raise TargetError(f"the stack does not know the cluster of {node}", hint="`mgmt clusters list` shows clusters")
    return name


class OciHead(HeadSide):
    """The target on the controller, for the cluster of the state folder there."""

    kind = "oci"
    times = TIMES

    def reboot(self, node: str) -> None:
        applied = read_applied(self.folder)
        release = settings_of(applied).stack_version if applied else "v3"
        self.runner.run(reboot_command(release, node), timeout_s=120).checked("run it as root on the controller")
