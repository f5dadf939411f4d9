"""Abilities of targets whose machines are elsewhere: list, replace and reboot them, export metrics, ask the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dalsegno.spec.facts import Cluster
from dalsegno.targets.base import Plan


class InstanceAction(Enum):
    """What a platform can be asked to do with one of its machines."""

    REPLACE = "replace"
    REBOOT = "reboot"


@dataclass(frozen=True)
class MachineStatus:
    """A machine of a platform, with its state there and, if it is known, in Slurm."""

    name: str
    node: str  # name in Slurm; "" if it is not known
    id: str
    group: str
    instance: str
    state: str  # state of the machine, in the platform's own words
    slurm_state: str = ""
    detail: str = ""


@runtime_checkable
class CanManageMachines(Protocol):
    """A target whose platform lists, replaces and reboots machines on request."""

    def machines(self) -> Sequence[MachineStatus]: ...

    def act_on_machines(self, action: InstanceAction, names: Sequence[str], *, through_api: bool) -> None: ...


@runtime_checkable
class ReturnsNodes(Protocol):
    """The head's side of a target whose platform returns nodes to service after it has replaced or rebooted them."""

    returns_nodes: bool


@runtime_checkable
class CanExport(Protocol):
    """A target that puts exporters and Prometheus on its own machines, and sends the metrics elsewhere."""

    def switch_exporters(self, on: bool) -> Plan: ...


@runtime_checkable
class AsksHead(Protocol):
    """A target whose head node can be asked for its own status, which has the verdict of the controller."""

    def head_status(self) -> Mapping[str, Any] | None:
        """Return what `dalsegno status --json` prints on the head; None if it gives no answer."""


@runtime_checkable
class ServesHomes(Protocol):
    """A target whose home folders are on other machines, where they can be deleted."""

    def remove_home(self, home: Path, uid: int | None, *, only_check: bool = False) -> None:
        """Delete a home folder with everything in it. Raise if it belongs to somebody else than this uid; with
        `only_check`, do nothing more."""


@runtime_checkable
class CanRenderFiles(Protocol):
    """A target whose platform reads files of its own, which people may want to use without `dalsegno up`."""

    def platform_files(self, cluster: Cluster) -> Mapping[str, str]:
        """Return the text of each file by name. Nothing is asked or changed."""
