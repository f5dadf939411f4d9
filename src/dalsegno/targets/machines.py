"""Protocols for targets whose machines are elsewhere: list, replace and reboot them, export metrics, ask the head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dalsegno.spec.facts import Cluster, RemoteWrite
from dalsegno.targets.base import Plan, Say

# Shows consequences, asks the user if something is destroyed (the second argument), and returns whether to continue.
Confirm = Callable[[Sequence[str], bool], bool]


class InstanceAction(Enum):
    """An action that a platform can be asked to carry out on a machine."""

    REPLACE = "replace"
    REBOOT = "reboot"


@dataclass(frozen=True)
class MachineStatus:
    """A machine of a platform, with its state there and, if known, its state in Slurm."""

    name: str
    node: str  # name in Slurm; "" if it is not known
    id: str
    group: str
    instance: str
    state: str  # the machine's state, as the platform names it
    slurm_state: str = ""
    detail: str = ""


@runtime_checkable
class CanManageMachines(Protocol):
    """A target whose platform lists, replaces and reboots machines on request."""

    def machines(self) -> Sequence[MachineStatus]: ...

    def act_on_machines(self, action: InstanceAction, names: Sequence[str], *, through_api: bool) -> None: ...


@runtime_checkable
class ReturnsNodes(Protocol):
    """A target on the head whose platform returns a node to service after it has replaced or rebooted the node."""

    returns_nodes: bool


@runtime_checkable
class CanExport(Protocol):
    """A target that puts exporters and Prometheus on its own machines, and sends the metrics elsewhere."""

    def switch_exporters(self, on: bool, say: Say) -> Plan: ...

    def metrics_permission(self) -> str:
        """Return the command that lets the instances write to the workspace."""

    def metrics_workspace(self) -> RemoteWrite | None:
        """Return the workspace that receives the metrics; None if there is none yet."""


@runtime_checkable
class CanHostGrafana(Protocol):
    """A target that can start Grafana on a machine of its cloud."""

    def start_grafana(self, say: Say) -> str:
        """Create or update the machine, and return the command that forwards Grafana's port to this machine."""

    def stop_grafana(self, say: Say) -> bool:
        """Delete the machine; return False if there is none."""


@runtime_checkable
class AsksWhileApplying(Protocol):
    """A target that knows only in `apply` what it destroys. It then calls `confirm`, and stops if the user declines."""

    confirm: Confirm


@runtime_checkable
class AsksHead(Protocol):
    """A target that can ask its head node for the status there, which includes the controller's view of the cluster."""

    def head_status(self) -> Mapping[str, Any] | None:
        """Return the output of `dalsegno status --json` on the head; None if the head does not answer."""


@runtime_checkable
class ServesHomes(Protocol):
    """A target whose home folders are on other machines, where they can be deleted."""

    def remove_home(self, home: Path, uid: int | None, *, only_check: bool = False) -> None:
        """Delete a home folder with everything in it. Raise an error if it does not belong to this uid.

        With `only_check`, do not delete anything.
        """


@runtime_checkable
class CanRenderFiles(Protocol):
    """A target whose platform reads its own kinds of files. People can use these files without `dalsegno up`."""

    def platform_files(self, cluster: Cluster) -> Mapping[str, str]:
        """Return the text of each file by name. This neither sends a request nor changes anything."""
